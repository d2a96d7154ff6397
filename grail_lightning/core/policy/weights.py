"""Weights that stay as they are inside a context, those that are cast once, and those with adapters merged in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def rotary_frequencies_kept(module: nn.Module) -> Iterator[None]:
    """A conversion to another dtype inside the context leaves rotary frequencies alone.

    A model that is loaded in bfloat16 has them in float32. Rounded to bfloat16 they turn by other angles.
    """
    before = {name: buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq")}
    yield
    for name, buffer in module.named_buffers():
        if name in before and buffer.dtype != before[name].dtype:
            buffer.data = before[name].to(buffer.device)


@contextmanager
def requiring_grad(parameters: list[nn.Parameter], value: bool) -> Iterator[None]:
    """Set `requires_grad` of parameters to `value` inside the context; all must have the opposite value before."""
    for parameter in parameters:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not value)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context; afterwards every module is in its earlier mode."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class CastsWeights(Protocol):
    """The parts of a policy that tell in which dtype it computes; `Policy` documents them."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the blocks compute."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""


@contextmanager
def weights_cast_once(policy: CastsWeights) -> Iterator[None]:
    """Under autocast, keep the cast weights for the whole call; Lightning's context would cast them at every token."""
    kind = policy.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    # Autocast caches no casts of frozen weights (those below adapters).
    frozen = [p for p in policy.parameters() if not p.requires_grad and p.is_floating_point()]
    with torch.autocast(kind, dtype=policy.compute_dtype, cache_enabled=True), requiring_grad(frozen, True):
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # The casts have no gradient: an update must not use them.


def merged_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its adapters merged into its weights, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config
    model._hf_peft_config_loaded = False
    return model

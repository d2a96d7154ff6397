"""Weights that do not change for a while: those of the reference policy, frozen ones, and those cast once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from grail_lightning.policy.model import Policy


class Reference:
    """The policy before training: a frozen copy, or the trained policy without its adapters.

    This is no module, because Lightning would treat it as a part of the trained module and of its checkpoints.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._place: tuple[torch.device, torch.dtype] | None = None  # Where a frozen copy was moved.

    @property
    def has_adapters(self) -> bool:
        """Whether it is the trained policy itself."""
        return self.policy.loading.lora is not None

    @contextmanager
    def running(self, beside: Policy) -> Iterator[Policy]:
        """The policy that computes as the reference inside the context.

        A frozen copy that is not sharded is moved to the device and the dtype of the trained policy, `beside`.
        """
        if self.has_adapters:
            with self.policy.adapters_off():
                yield self.policy
            return
        place = beside.device, beside.model.dtype
        # `to` visits every weight, and DGPO enters for each chunk of tokens. A sharded copy, even whole, would be
        # sharded again.
        if self._place != place and not isinstance(self.policy, FSDPModule):
            self.policy.to(*place)
            self._place = place
        yield self.policy


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
def weights_cast_once(policy: Policy) -> Iterator[None]:
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

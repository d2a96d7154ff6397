"""Decoder blocks compiled by `torch.compile`, for inputs of any shape.

A block starts some dozens of kernels from Python in its forward pass and again in its backward pass. Compiled, it
starts a few: matrix products, attention, and one kernel for each run of norms, rotations and gates between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._functorch import config as autograd_config
from transformers import Cache

from grail_lightning.core.functional.tokens import has_compiler

Compile = bool | Literal["auto", "inductor", "aot_eager", "eager"]

SHOWN_OF_ERROR = 300
"""Characters of the error of a trial that are shown."""

_MOST_VARIANTS = 32
"""The most versions of a block in one process. Training and evaluation, passes with and without gradient, frozen
weights, adapters that are off, each layout and micro-batches of one row have a version each. Torch's own limit is 8,
beyond which it runs blocks as they are."""


class CompiledBlocks:
    """The blocks of a decoder with compiled forward and backward passes; blocks of one kind are compiled once.

    The forward method of each block is compiled, and nothing around it. Hooks of blocks, with which FSDP2 gathers
    weights and saliency keeps a block's output, run as they do otherwise. The model is changed inside of `running`
    alone, so that its copies, its state dict and other passes, such as those of decoding with a growing cache, know
    nothing of it.

    `backend` is one of `torch.compile`. Sizes are variables of the compiled code, except sizes of 0 and 1.
    """

    def __init__(self, blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
        self.blocks = list(blocks)
        # Otherwise a pass could have one backward pass alone, which reuses the memory of what it has read, and not two
        # of a graph that is retained. The switch is that of the whole process.
        autograd_config.donated_buffer = False
        options = {"dynamic": True, "recompile_limit": _MOST_VARIANTS, "isolate_recompiles": True}
        self._forward: Any = torch.compile(_forward, backend=backend, **options)  # type: ignore[call-overload]

    @contextmanager
    def running(self, cache: Cache | None = None) -> Iterator[None]:
        """Inside the context calls of the blocks run compiled code, which is made at the first call of its kind.

        Blocks that are called with `cache` get one that holds their own layer alone. Otherwise the index of a layer
        would be part of the compiled code, which would be made once for each layer.
        """
        for number, block in enumerate(self.blocks):
            forward = partial(self._forward, block)
            vars(block)["forward"] = forward if cache is None else _with_layer_alone(forward, cache, number)
        try:
            yield
        finally:
            for block in self.blocks:
                del vars(block)["forward"]


def _forward(block: nn.Module, *args: Any, **options: Any) -> Any:
    # FSDP2 gives a block another class; Transformers' checkpointing looks for the method in the class.
    return type(block).forward(block, *args, **options)


class _LayerCache(Cache):  # type: ignore[misc]  # Transformers has no types.
    """A cache that holds one layer, for any index."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        updated: tuple[Tensor, Tensor] = self.layers[0].update(keys, values, *args, **options)
        return updated


def _with_layer_alone(forward: Callable[..., Any], cache: Cache, number: int) -> Callable[..., Any]:
    layer = _LayerCache(layers=[cache.layers[number]])

    def called(*args: Any, **options: Any) -> Any:
        positional = [layer if value is cache else value for value in args]
        return forward(*positional, **{name: layer if value is cache else value for name, value in options.items()})

    return called


def chosen_backend(option: Compile, device: torch.device) -> str | None:
    """The backend of `torch.compile` that `Loading.compile` means for a model on `device`; None is no compiling."""
    if option == "auto":
        # Code is made for the first shapes of each kind. A resumed run has others, so that it may round differently.
        fits = device.type == "cuda" and has_compiler() and not torch.are_deterministic_algorithms_enabled()
        return "inductor" if fits else None
    if isinstance(option, bool):
        return "inductor" if option else None
    return option

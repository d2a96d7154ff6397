"""Decoder blocks through `torch.compile`, where the policy is trained; sampling with its growing cache stays eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# A block is met in training and evaluation mode, with and without gradients, frozen, masked and unmasked.
VARIANTS = 64


class CompiledForward:
    """Stands in for a block's `forward`.

    `nn.Module.compile` would take the hooks into the graph, and those that are registered later (saliency at a block,
    FSDP) would be passed over in silence; the parameters' names would not change either way.

    Args:
        block: Whose `forward`; it finds it again in a copy of itself.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own `forward`, compiled unless a key-value cache takes part."""
        plain = type(self.block).forward
        if any(name.startswith("past_key_value") and value is not None for name, value in kwargs.items()):
            return plain(self.block, *args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(plain, dynamic=True)
        return self._compiled(self.block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self.block, memo))


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile decoder blocks, in place, each when it first runs.

    One graph serves blocks that are alike, and all batch sizes and lengths.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    # Saliency beside the update runs backward twice through one graph: its buffers must survive the first.
    functorch.donated_buffer = False
    for block in blocks:
        block.forward = CompiledForward(block)

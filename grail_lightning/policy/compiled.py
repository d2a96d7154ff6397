"""Decoder blocks through `torch.compile`, with and without a key-value cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# A block is met in training and evaluation mode, with and without gradients, frozen, masked and unmasked, and with
# either kind of cache.
VARIANTS = 64

Cached = tuple[Callable[..., Any], tuple[Any, ...]]
"""What stands in for a cache while one block runs, and what it is made of: tensors and numbers that may change."""


class CompiledForward:
    """Stands in for a block's `forward`.

    `nn.Module.compile` would take the hooks into the graph, and those that are registered later (saliency at a block,
    FSDP) would be passed over in silence; the parameters' names would not change either way.

    A cache holds other tensors for each block, and a graph that found them there would serve that block alone. Layers
    of our caches say what they consist of (`traced`), so that one graph serves all blocks; others run as they are.

    Args:
        block: Whose `forward`; it finds it again in a copy of itself.
        index: Which layer of a cache is the block's; None if it has none of its own.
    """

    def __init__(self, block: nn.Module, index: int | None) -> None:
        self.block, self.index = block, index
        self._compiled: Callable[..., Any] | None = None
        self._continued: Callable[..., Any] | None = None

    def __call__(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's own `forward`, compiled unless a cache takes part that cannot be traced."""
        plain = type(self.block).forward
        name = next((k for k, v in kwargs.items() if k.startswith("past_key_value") and v is not None), None)
        if name is None:
            if self._compiled is None:
                self._compiled = torch.compile(plain, dynamic=True)
            return self._compiled(self.block, states, *args, **kwargs)
        layers = getattr(kwargs[name], "layers", ())
        layer: Any = layers[self.index] if self.index is not None and self.index < len(layers) else None
        if not hasattr(layer, "traced"):
            return plain(self.block, states, *args, **kwargs)
        with layer.traced(states.shape[1]) as cached:
            if cached is not None:
                if self._continued is None:
                    self._continued = torch.compile(_continue, dynamic=True)
                options = {k: v for k, v in kwargs.items() if k != name}
                return self._continued(self.block, states, args, options, name, *cached)
        return plain(self.block, states, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self.block, memo), self.index)


def _continue(
    block: nn.Module, states: torch.Tensor, args: Any, options: Any, name: str, make: Callable[..., Any], parts: Any
) -> Any:
    return type(block).forward(block, states, *args, **options, **{name: make(*parts)})


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile decoder blocks, in place, each when it first runs.

    One graph serves blocks that are alike, and all batch sizes and lengths.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    # Saliency beside the update runs backward twice through one graph: its buffers must survive the first.
    functorch.donated_buffer = False
    for number, block in enumerate(blocks):
        named = any(getattr(module, "layer_idx", None) == number for module in block.modules())
        block.forward = CompiledForward(block, number if named else None)

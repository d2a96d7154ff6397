"""Attention in prefix trees by torch's `flex_attention`, whose cost follows the pairs of tokens that attend.

The distinct tokens of a forest are numbered in preorder, and ``end_j`` follows the descendants of token ``j``. So ``i``
attends to ``j`` where ``j ≤ i < end_j``. The kernel skips blocks of 128 × 128 pairs of which none attends.

Shapes: ``N`` distinct tokens, ``d`` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK_TOKENS = 128
"""Side of the blocks of `flex_attention`. Layouts are padded to a multiple, so that few shapes are compiled."""


def make_block_mask(end: Tensor, device: torch.device) -> BlockMask:
    """The block mask of a forest.

    Args:
        end: ``[N]`` long, the number that follows those of each token's descendants; ``j + 1`` for padding.
        device: The device on which attention is computed.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    until = end.to(device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    number = len(end)
    return create_block_mask(attends, None, None, number, number, device=device, BLOCK_SIZE=BLOCK_TOKENS)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """``[1, heads, N, d]``: attention of one forest.

    Args:
        query: ``[1, heads, N, d]``.
        key: ``[1, key heads, N, d]``.
        value: ``[1, key heads, N, d]``.
        mask: The mask from `make_block_mask`.
        scale: The factor of the scores; None is ``d^(-1/2)``.
    """
    grouped = query.shape[1] != key.shape[1]
    # Under autocast rotary embeddings may leave queries and keys in float32 beside values in half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return _kernel(query.device.type)(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


@cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    """The compiled kernel. A CPU has none with a backward pass, so `flex_attention` itself computes there."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":
        return cast(Callable[..., Tensor], flex_attention)
    import torch._functorch.config as compiled_backward

    # By default a compiled backward pass overwrites what the forward pass has saved, and then refuses `retain_graph`,
    # with which saliency takes its gradient before the update does. The backward pass is compiled when it first runs,
    # so that the option must still hold then.
    compiled_backward.donated_buffer = False
    return cast(Callable[..., Tensor], torch.compile(flex_attention))

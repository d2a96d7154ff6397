"""Masked reductions, and log-probabilities that never hold all logits at once.

Shapes: ``B`` rows, ``T`` response tokens, ``D`` width, ``V`` vocabulary, ``N`` selected positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEFAULT_CHUNK_TOKENS = 1024


class TokenStats(NamedTuple):
    """What the policy says about given tokens; `entropy` is None unless it was asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``values`` where ``mask``; what stands elsewhere, NaN included, does not matter."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``values`` where ``mask``; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_zscore(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``(x − mean) / sqrt(var + eps)`` within each row's mask (population variance); ``[B, T]``, 0 outside."""
    mean = masked_mean(values, mask, dim=1)[:, None]
    variance = masked_mean((values - mean).square(), mask, dim=1)[:, None]
    return ((values - mean) / torch.sqrt(variance + eps)).masked_fill(~mask, 0)


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> TokenStats:
    r"""Log-probability of each token, and the entropy of its distribution, in chunks over tokens.

    .. math:: \log \mathrm{softmax}(\mathrm{head}(h) / \tau)_{y}, \qquad H = -\sum_v p_v \log p_v

    Forward and backward hold logits of `chunk_tokens` positions at a time: the backward pass computes a chunk's logits
    anew. Softmax and entropy are taken in float32 at least, whatever the head's dtype. The entropy carries no gradient.

    Args:
        hidden: ``[..., D]`` states that predict the tokens (already shifted).
        head: hidden ``[n, D]`` to logits ``[n, V]`` as the model itself applies it, with bias, scale and soft cap.
        token_ids: ``[...]`` long.
        temperature: Divides the logits.
        chunk_tokens: Positions whose logits exist at a time.
        with_entropy: Whether to return the entropy in nats, too.

    Returns:
        Both shaped like `token_ids`.

    Raises:
        ValueError: If the temperature is not positive or the shapes do not fit.
    """
    if temperature <= 0:
        raise ValueError(f"`temperature` must be positive, but got {temperature}. Greedy sampling reports at 1.")
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(
            f"`hidden` must be `token_ids` plus a width, but got {tuple(hidden.shape)} and {tuple(token_ids.shape)}."
        )
    states, ids = hidden.reshape(-1, hidden.shape[-1]), token_ids.reshape(-1)

    def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        log_norm = logits.logsumexp(-1)
        chosen = logits.gather(-1, ids[:, None]).squeeze(-1) - log_norm
        if not with_entropy:
            return chosen, chosen.new_zeros(chosen.shape)
        with torch.no_grad():
            # H = log Z − Σ p·z: one softmax, no log-softmax of the whole vocabulary beside it.
            entropy = log_norm - (torch.softmax(logits, -1) * logits).sum(-1)
        return chosen, entropy

    logprobs, entropies = [], []
    # One chunk needs no recomputation to bound its memory.
    recompute = torch.is_grad_enabled() and len(ids) > chunk_tokens
    for part, part_ids in zip(torch.split(states, chunk_tokens), torch.split(ids, chunk_tokens), strict=True):
        lp, ent = checkpoint(chunk, part, part_ids, use_reentrant=False) if recompute else chunk(part, part_ids)
        logprobs.append(lp)
        entropies.append(ent)
    if not logprobs:  # No token at all: keep the graph, so that a backward pass through an empty row still works.
        empty = hidden.sum(-1)
        return TokenStats(empty, empty.detach() if with_entropy else None)
    result = torch.cat(logprobs).reshape(token_ids.shape)
    return TokenStats(result, torch.cat(entropies).reshape(token_ids.shape) if with_entropy else None)

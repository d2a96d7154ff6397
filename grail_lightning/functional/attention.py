"""Figures of attention maps: how far each token looks back, and how much later tokens look at it.

Shapes: ``B`` rows, ``H`` heads, ``N`` positions. ``maps[b, h, t, s]`` is the attention of the query ``t`` to the key
``s ≤ t``; it is 0 at keys that are padding. The valid positions of a row are neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.functional.attribution import count_share


def lookback(maps: Tensor, limit: int | None = None) -> Tensor:
    r"""The mean distance from each query to the keys that it attends to.

    .. math:: d_t = \sum_{s \le t} a_{ts} \min(t - s,\ limit)

    Args:
        maps: ``[B, H, N, N]``.
        limit: The distance from which keys count as equally far; None is no limit.

    Returns:
        ``[B, H, N]``, in tokens.

    Source: the windowed average attention distance of arXiv 2510.13554.
    """
    distance = _distance(maps)
    if limit is not None:
        distance = distance.clamp(max=limit)
    return torch.einsum("bhts,ts->bht", maps, distance.to(maps.dtype))


def future_influence(maps: Tensor, valid: Tensor, nearest: int, farthest: int) -> Tensor:
    r"""The mean attention that a token receives from the queries that follow at a distance within a window.

    .. math:: f_s = \frac{1}{|Q_s|} \sum_{t \in Q_s} a_{ts}, \qquad
              Q_s = \{t \text{ valid} : nearest \le t - s \le farthest\}

    Args:
        maps: ``[B, H, N, N]``.
        valid: ``[B, N]`` bool, the queries that count.
        nearest: The smallest distance.
        farthest: The largest distance.

    Returns:
        ``[B, H, N]``; 0 where no query counts.

    Source: the future attention influence of arXiv 2510.13554.
    """
    distance = _distance(maps)
    counted = ((distance >= nearest) & (distance <= farthest) & valid[:, :, None]).to(maps.dtype)
    total = torch.einsum("bhts,bts->bhs", maps, counted)
    return total / counted.sum(1).clamp(min=1)[:, None]


def _distance(maps: Tensor) -> Tensor:
    """``[N, N]``: how many positions the key ``s`` precedes the query ``t``; negative for later keys."""
    place = torch.arange(maps.shape[-1], device=maps.device)
    return place[:, None] - place


def top_share(scores: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens with the largest scores of each row: ``ceil(share · n)`` of its ``n`` valid ones.

    Args:
        scores: ``[B, T]``.
        mask: ``[B, T]`` bool, the valid tokens.
        share: The share of tokens, in [0, 1].

    Returns:
        ``[B, T]`` bool. Of equal scores the earlier tokens are taken.
    """
    return top_tokens(scores, mask, count_share(mask.sum(1), share))


def top_tokens(scores: Tensor, mask: Tensor, number: Tensor) -> Tensor:
    """``[B, T]`` bool: the `number` ``[B]`` valid tokens of each row with the largest scores; see `top_share`."""
    order = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    taken = torch.arange(scores.shape[1], device=scores.device) < number[:, None]
    return torch.zeros_like(mask).scatter(1, order, taken) & mask

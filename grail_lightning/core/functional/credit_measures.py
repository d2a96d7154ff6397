"""Measures of credit (its concentration, its ability to find flawed tokens) and of attention maps.

Shapes: ``B`` rows, ``T`` response tokens, ``M`` forks, ``H`` heads, ``N`` positions. Functions that return one value a
row give NaN to rows without one. In an attention map, ``maps[b, h, t, s]`` is the attention of the query ``t`` to the
key ``s ≤ t``; it is 0 at keys that are padding, and the valid positions of a row are neighbours.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grail_lightning.core.functional.tokens import masked_sum


def ess_ratio(credit: Tensor, mask: Tensor) -> Tensor:
    r"""``[B]``: effective sample size of the credit ``A·w`` over the length, :math:`(\sum|a_t|)^2 / (L \sum a_t^2)`."""
    size = credit.abs()
    squares = masked_sum(size.square(), mask, dim=1)
    ratio = masked_sum(size, mask, dim=1).square() / (mask.sum(1) * squares)
    return torch.where(squares > 0, ratio, torch.nan)


def _count_share(lengths: Tensor, share: float) -> Tensor:
    """``[B]`` long: ``ceil(share · n)`` of each length ``n``, for the share as it is written in decimals.

    As a binary number 0.3 may come out above three tenths, and 0.3 of 50 tokens would be 16.
    """
    exact = Fraction(str(share))
    return torch.tensor([math.ceil(exact * length) for length in lengths.tolist()]).to(lengths)


def top_mass(credit: Tensor, mask: Tensor, share: float = 0.1) -> Tensor:
    r"""``[B]``: the part of :math:`\sum|a_t|` that belongs to its largest ``ceil(share · L)`` tokens."""
    size = credit.abs().masked_fill(~mask, 0)
    ordered = size.sort(1, descending=True).values
    top = torch.arange(size.shape[1], device=size.device) < _count_share(mask.sum(1), share)[:, None]
    total = size.sum(1)
    return torch.where(total > 0, masked_sum(ordered, top, dim=1) / total, torch.nan)


class Forks(NamedTuple):
    """Pairs of rows of a group that are equal up to a token, from which one continues wrongly and the other soundly."""

    flawed: Tensor  # [M] long, the rows that continue wrongly.
    sound: Tensor  # [M] long, the rows that continue soundly.
    token: Tensor  # [M] long, the first token in which both differ.


def forks(nodes: Tensor, group: Tensor, flawed: Tensor, sound: Tensor) -> Forks:
    """The forks between the tokens of flawed and of sound results, ``[B, T]`` bool each.

    A fork is the first token in which two rows differ, if it belongs to the flawed result of one and to the sound
    result of the other. A result that is the beginning of the other ends right before the fork. `nodes` ``[B, T]`` are
    the nodes of the groups' prefix trees, −1 on padding.
    """
    pairs = (group[:, None] == group) & flawed.any(1)[:, None] & sound.any(1)
    wrong, right = pairs.nonzero(as_tuple=True)
    token = (nodes[wrong] == nodes[right]).long().cumprod(1).sum(1)  # The number of tokens that both begin with.
    valid = pad(nodes >= 0, (0, 1))
    # The tokens of a result, and the one right behind it.
    bad, good = ((pad(result, (0, 1)) | pad(result, (1, 0))) & valid for result in (flawed, sound))
    is_fork = bad[wrong, token] & good[right, token]
    return Forks(wrong[is_fork], right[is_fork], token[is_fork])


def fork_wins(scores: Tensor, flawed: Tensor, sound: Tensor, token: Tensor) -> Tensor:
    """``[M]`` float64: 1 where the flawed row's token has the higher one of ``scores [B, T]``, ½ for a tie, else 0."""
    gap = scores[flawed, token] - scores[sound, token]
    return (gap > 0).double() + (gap == 0).double() / 2


def lookback(maps: Tensor, limit: int | None = None) -> Tensor:
    r"""The mean distance from each query to the keys that it attends to.

    .. math:: d_t = \sum_{s \le t} a_{ts} \min(t - s,\ limit)

    From ``[B, H, N, N]`` to ``[B, H, N]``, in tokens; a `limit` of None is none.

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

    From ``[B, H, N, N]`` to ``[B, H, N]``, 0 where no query counts; `valid` is ``[B, N]`` bool.

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
    """``[B, T]`` bool: the ``ceil(share · n)`` tokens of each row's ``n`` valid ones that have the largest scores.

    Of equal scores the earlier tokens are taken.
    """
    order = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    taken = torch.arange(scores.shape[1], device=scores.device) < _count_share(mask.sum(1), share)[:, None]
    return torch.zeros_like(mask).scatter(1, order, taken) & mask

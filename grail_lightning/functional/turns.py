"""Maths of rollouts of several turns: where turns begin, and what a turn is worth beside others.

Shapes: ``B`` rows, ``T`` response tokens, ``K`` turns of the row that has the most, ``N`` values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.functional.advantages import EQUAL_REWARDS, group_std, group_sums

_SCALE_EPS = 1e-4


def turn_numbers(mask: Tensor, turn: Tensor | None) -> Tensor:
    """``[B, T]`` long: the number of the turn of each sampled token (the `mask`), −1 elsewhere.

    Without ``turn [B, T]`` all sampled tokens of a row are one turn.
    """
    return (torch.zeros_like(mask, dtype=torch.long) if turn is None else turn).masked_fill(~mask, -1)


def existing_turns(numbers: Tensor) -> Tensor:
    """``[B, K]`` bool: the turns that each row has; K is at least 1, and a row without a token has none."""
    last = torch.nn.functional.pad(numbers, (0, 1), value=-1).amax(1)
    return torch.arange(max([1, *(last + 1).tolist()]), device=numbers.device) <= last[:, None]


def turn_starts(numbers: Tensor, turns: int) -> Tensor:
    """``[B, K]`` long: the column of the first sampled token of each of `turns` turns; T for one that does not exist.

    A turn without a token begins where the next one does.
    """
    rows, width = numbers.shape
    columns = torch.arange(width, device=numbers.device).expand(rows, -1)
    first = numbers.new_full((rows, turns + 1), width).scatter_reduce(1, numbers + 1, columns, "amin")[:, 1:]
    return first.flip(1).cummin(1).values.flip(1)


def sum_by_turn(values: Tensor, numbers: Tensor, turns: int) -> Tensor:
    """``[B, T] -> [B, K]``: the sum over the sampled tokens of each turn."""
    return values.new_zeros(len(values), turns + 1).scatter_add(1, numbers + 1, values)[:, 1:]


def spread_turns(values: Tensor, numbers: Tensor) -> Tensor:
    """``[B, K] -> [B, T]``: the value of its turn on each sampled token, 0 elsewhere."""
    return values.gather(1, numbers.clamp(min=0)).masked_fill(numbers < 0, 0)


def relative(values: Tensor, key: Tensor, counted: Tensor, *, standardise: bool = False) -> Tensor:
    r"""``[B, K]``: each counted value beside the counted ones with the same key, 0 for the others.

    .. math:: z_n = x_n - \bar x, \qquad \text{or standardised } z_n = (x_n - \bar x) / (s + 10^{-4})

    Mean and unbiased standard deviation ``s`` are those of the values with the key, ``[B, K]`` or ``[B, 1]``. Values
    that are all equal, such as a single one, have exactly 0: a rounding error must not become an advantage.
    """
    found, same = values[counted], key.expand_as(values)[counted]
    (total, size), std = group_sums(found, same), group_std(found, same)
    centred = found - total / size
    scaled = centred / (std + _SCALE_EPS) if standardise else centred
    return torch.zeros_like(values).masked_scatter(counted, scaled.masked_fill(std <= EQUAL_REWARDS, 0))


def last_turns(exists: Tensor) -> Tensor:
    """``[B, K]`` bool: the last turn of each row."""
    return exists & ~torch.nn.functional.pad(exists[:, 1:], (0, 1))


def turn_changes(values: Tensor, outcomes: Tensor, exists: Tensor) -> Tensor:
    r"""``[B, K]``: the change of value that each turn makes, 0 for turns that do not exist.

    .. math:: \delta_k = V(s_{k+1}) - V(s_k), \qquad \delta_K = r - V(s_K)

    From the values ``[B, K]`` of the states in which turns begin, and the outcomes ``r [B]``.
    """
    after = torch.where(last_turns(exists), outcomes[:, None], values.roll(-1, 1))
    return (after - values).masked_fill(~exists, 0)

"""Values of the states that a group's rollouts pass through, and the changes of value along each rollout.

A state is what is known after a token, such as the tokens so far. Rollouts that are in one state have its number.

Shapes: ``B`` rows, ``T`` response tokens, ``N`` states. `states` ``[B, T]`` long is the state after each token, −1 on
padding; `roots` ``[B]`` long the state before the first token; `outcomes` ``[B]`` the outcome of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Visits(NamedTuple):
    """The outcomes of the rollouts that reach each state. A rollout counts once in each of its states.

    Attributes:
        total: ``[N]`` float64, the sum of their outcomes.
        number: ``[N]`` float64, the number of rollouts.
    """

    total: Tensor
    number: Tensor


def count_visits(states: Tensor, roots: Tensor, outcomes: Tensor, num_states: int) -> Visits:
    """The outcomes of the rows that reach each of the `num_states` states."""
    path = torch.cat([roots[:, None], states], 1)
    rows = torch.arange(len(path))[:, None].expand_as(path)
    cells = torch.unique((rows * num_states + path)[path >= 0])
    row, state = cells // num_states, cells % num_states
    none = torch.zeros(num_states, dtype=torch.float64)
    total = none.index_add(0, state, outcomes.double()[row])
    return Visits(total, torch.bincount(state, minlength=num_states).double())


def state_values(
    states: Tensor, roots: Tensor, outcomes: Tensor, visits: Visits, *, own_row: bool = True, shrinkage: float = 1.0
) -> Tensor:
    r"""The value of the state before the first token of each row, and after each token.

    .. math:: V(u) = \frac{1}{n} \sum_j r_j, \qquad
              V_{-i}(u) = \frac{\sum_{j \ne i} r_j + \kappa V_{-i}(\mathrm{parent}(u))}{n - 1 + \kappa}

    ``n`` rows reach the state. With the row itself left out (``V_{-i}``), a state that no other row reaches has the
    value of the row's previous state, its parent. A row without any other has its own outcome as the value throughout.

    From the `visits` of all rows, these among them, to ``[B, T + 1]`` float64; padding has the value of the last state.
    `own_row` is whether the row itself counts in its values. If it is left out, `shrinkage` is κ, the number of
    outcomes that the parent's value stands for.
    """
    outcomes = outcomes.double()
    path = _continued(torch.cat([roots[:, None], states], 1))
    total, number = visits.total[path], visits.number[path]
    if own_row:
        return total / number
    total, number = total - outcomes[:, None], number - 1
    values = torch.empty_like(total)
    values[:, 0] = torch.where(number[:, 0] > 0, total[:, 0] / number[:, 0].clamp(min=1), outcomes)
    known = (number > 0) & torch.nn.functional.pad(path[:, 1:] != path[:, :-1], (1, 0))
    some = known.any(0).tolist()
    for t in range(1, path.shape[1]):
        values[:, t] = values[:, t - 1]
        if some[t]:
            shrunk = (total[:, t] + shrinkage * values[:, t - 1]) / (number[:, t] + shrinkage).clamp(min=1)
            values[:, t] = torch.where(known[:, t], shrunk, values[:, t - 1])
    return values


def value_changes(states: Tensor, roots: Tensor, outcomes: Tensor, values: Tensor) -> Tensor:
    r"""The change of value that each token belongs to.

    .. math:: \delta_t = V(s_{e(t)}) - V(s_{t-1})

    ``e(t)`` is the first token from ``t`` on at which the state changes: all tokens of a segment between two states get
    the segment's change. The tokens after the last change get ``r - V(s_{t-1})``, with the row's outcome ``r``. From
    the `values` of `state_values` to ``[B, T]`` float64, zero on padding.
    """
    path = _continued(torch.cat([roots[:, None], states], 1))
    width = states.shape[1]
    changed = torch.where(path[:, 1:] != path[:, :-1], torch.arange(width), width)
    end = changed.flip(1).cummin(1).values.flip(1)
    reached = values[:, 1:].gather(1, end.clamp(max=max(width - 1, 0)))
    reached = torch.where(end < width, reached, outcomes.double()[:, None])
    return (reached - values[:, :-1]).masked_fill(states < 0, 0)


def _continued(path: Tensor) -> Tensor:
    """The states ``[B, T + 1]`` with the last one of each row in place of its padding, which follows all tokens."""
    last = (path >= 0).sum(1, keepdim=True) - 1
    return path.gather(1, torch.minimum(torch.arange(path.shape[1]), last))

"""Values of states, as means of the outcomes of the rollouts that reach them.

A state is what is known after a token, such as the tokens so far. Rollouts that are in one state have its number. A
path ``[B, T + 1]`` long has the state before the first token of each row and after each token, −1 on padding.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def state_values(
    path: Tensor, outcomes: Tensor, *, own_row: bool = True, shrinkage: float = 1.0
) -> tuple[Tensor, Tensor]:
    r"""The value of each state of a path, and the number of rows that reach it.

    .. math:: V(u) = \frac{1}{n} \sum_j r_j, \qquad
              V_{-i}(u) = \frac{\sum_{j \ne i} r_j + \kappa V_{-i}(\mathrm{parent}(u))}{n - 1 + \kappa}

    ``n`` rows reach the state. With the row itself left out (``V_{-i}``), a state that no other row reaches has the
    value of the row's previous state, its parent. A row without any other has its own outcome as the value throughout.

    From a path and the outcomes ``[B]`` to ``[B, T + 1]`` float64 each; padding has the value of the last state.
    `own_row` is whether the row itself counts in its values. If it is left out, `shrinkage` is κ, the number of
    outcomes that the parent's value stands for.
    """
    outcomes, num_states = outcomes.double(), int(path.max()) + 1
    rows = torch.arange(len(path))[:, None].expand_as(path)
    cells = torch.unique((rows * num_states + path)[path >= 0])  # A row counts once in each of its states.
    row, state = cells // num_states, cells % num_states
    path = _continued(path)
    total = torch.zeros(num_states, dtype=torch.float64).index_add(0, state, outcomes[row])[path]
    number = reached = torch.bincount(state, minlength=num_states).double()[path]
    if own_row:
        return total / number, reached
    total, number = total - outcomes[:, None], number - 1
    values = torch.empty_like(total)
    values[:, 0] = torch.where(number[:, 0] > 0, total[:, 0] / number[:, 0].clamp(min=1), outcomes)
    has_rollouts = (number > 0) & torch.nn.functional.pad(path[:, 1:] != path[:, :-1], (1, 0))
    some = has_rollouts.any(0).tolist()
    for t in range(1, path.shape[1]):
        values[:, t] = values[:, t - 1]
        if some[t]:
            shrunk = (total[:, t] + shrinkage * values[:, t - 1]) / (number[:, t] + shrinkage).clamp(min=1)
            values[:, t] = torch.where(has_rollouts[:, t], shrunk, values[:, t - 1])
    return values, reached


def value_changes(path: Tensor, outcomes: Tensor, values: Tensor) -> Tensor:
    r"""The change of value that each token belongs to.

    .. math:: \delta_t = V(s_{e(t)}) - V(s_{t-1})

    ``e(t)`` is the first token from ``t`` on at which the state changes: all tokens of a segment between two states get
    the segment's change. The tokens after the last change get ``r - V(s_{t-1})``, with the row's outcome ``r``. From
    the `values` of `state_values` to ``[B, T]`` float64, zero on padding.
    """
    padding, width = path[:, 1:] < 0, path.shape[1] - 1
    path = _continued(path)
    changed = torch.where(path[:, 1:] != path[:, :-1], torch.arange(width), width)
    end = changed.flip(1).cummin(1).values.flip(1)
    reached = values[:, 1:].gather(1, end.clamp(max=max(width - 1, 0)))
    reached = torch.where(end < width, reached, outcomes.double()[:, None])
    return (reached - values[:, :-1]).masked_fill(padding, 0)


def _continued(path: Tensor) -> Tensor:
    """The states ``[B, T + 1]`` with the last one of each row in place of its padding, which follows all tokens."""
    last = (path >= 0).sum(1, keepdim=True) - 1
    return path.gather(1, torch.minimum(torch.arange(path.shape[1]), last))

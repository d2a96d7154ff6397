"""Credit from the rollouts of the group: values of the states that they pass through (TEMPO, Numca), and λ-GRPO.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.credit.states import States, find_state, marked_states, prefix_states
from grail_lightning.functional.advantages import EQUAL_REWARDS, group_sums
from grail_lightning.functional.state_values import Visits, count_visits, state_values, value_changes
from grail_lightning.policy import Policy
from grail_lightning.policy.aligned import response_nodes

Outcome = Literal["reward", "correctness"]


class TreeAdvantage(TokenCredit):
    r"""Adds to each token's advantage the change of value from the state before it to the state after it.

    The responses of a group form a prefix tree. The value of a state is the mean outcome of the group's rows that reach
    it, so the values need no model and no further sampling:

    .. math:: A_{it} = A_i + c\,\bigl(V(s_t) - V(s_{t-1})\bigr), \qquad
              V(s) = \frac{1}{n_s} \sum_{j \text{ reaches } s} r_j

    With `own_row` off, the values of row ``i`` are those of the other rows, shrunk to the value of the state before:

    .. math:: V_{-i}(s_t) = \frac{\sum_{j \ne i} r_j + \kappa V_{-i}(s_{t-1})}{n_{s_t} - 1 + \kappa}

    The terms of a row that is alone in its states are 0, so the method becomes GRPO where texts part early: `in_tree`
    is the share of tokens that are in a state with another row. The last change of a row that leaves the tree includes
    its own outcome, unless `own_row` is off. A group whose outcomes are all equal has no terms, and its rows are
    not run. Truncated rollouts count in the values.

    Args:
        outcome: The outcomes ``r``: the rewards, or 1 for a right response and 0 for a wrong one.
        own_row: Whether a row counts in its own values.
        shrinkage: κ, the number of outcomes that the value of the state before stands for; used if `own_row` is off.
        scale: c, the factor of the terms.
        standardise: Whether the terms are divided by the unbiased standard deviation of the group's outcomes + 1e-4,
            which goes with `objective.scale_rewards: group`. Without a deviation they are 0.
        advantage: Whether the group's advantage ``A_i`` is kept; without it the terms are the whole advantage.
        state: The state: `prefix`, the tokens so far; `numbers`, the set of numbers completed so far; or the import
            path of a function from a text to pairs (number of characters after which a state is reached, its key as a
            string). All tokens from one state to the next get the change between them, those after the last state
            the outcome less its value.

    Raises:
        ValueError: For a negative number, or a function that cannot be found.

    Source: TEMPO, arXiv 2509.18314, and its published code, which keeps the row, divides by the standard deviation +
    1e-6 or not at all, and has no scale; states: Numca, arXiv 2605.29782; `own_row: false` is ours.
    """

    def __init__(
        self,
        outcome: Outcome = "reward",
        own_row: bool = True,
        shrinkage: float = 1.0,
        scale: float = 1.0,
        standardise: bool = False,
        advantage: bool = True,
        state: str = "prefix",
    ) -> None:
        for name, value in (("shrinkage", shrinkage), ("scale", scale)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` must be finite and at least 0, but got {value}.")
        if outcome not in ("reward", "correctness"):
            raise ValueError(f"`outcome` must be reward or correctness, but got {outcome!r}.")
        self.outcome, self.own_row, self.shrinkage, self.scale = outcome, own_row, shrinkage, scale
        self.standardise, self.advantage = standardise, advantage
        self.marks_of = find_state(state)

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 1 (0 without the group's advantage), and the terms as an additive stage."""
        mask, advantages = batch.response_mask, batch.advantages
        states = prefix_states(batch) if self.marks_of is None else marked_states(batch, policy, self.marks_of)
        outcomes = (batch.rewards if self.outcome == "reward" else batch.correct).cpu().double()
        visits = count_visits(states.after, states.roots, outcomes, states.number)
        terms = self.scale * self._changes(states, outcomes, visits)
        if self.standardise:
            terms = terms * _inverse_std(outcomes, batch.group.cpu())[:, None]
        additive = terms.to(advantages)
        return TokenWeights(
            values=mask.to(advantages.dtype) if self.advantage else torch.zeros_like(mask, dtype=advantages.dtype),
            # In the direction of the outcome: what a token took from a wrong response, or gave to a right one.
            scores=advantages.sign()[:, None] * additive,
            additive=additive,
            fallback=torch.zeros_like(advantages, dtype=torch.bool),
            metrics={"in_tree": self._in_tree(visits, states)},
        )

    def _changes(self, states: States, outcomes: Tensor, visits: Visits) -> Tensor:
        """``[B, T]`` float64: the changes of value; a rounding error is no change."""
        path = states.after, states.roots, outcomes
        values = state_values(*path, visits, own_row=self.own_row, shrinkage=self.shrinkage)
        found = value_changes(*path, values)
        return found.masked_fill(found.abs() <= EQUAL_REWARDS, 0)

    def _in_tree(self, visits: Visits, states: States) -> Mean:
        """The share of tokens after which another row is in the same state."""
        reached = states.after[states.after >= 0]
        return Mean(float((visits.number[reached] > 1).sum()), len(reached))


class PrefixWeights(TokenCredit):
    r"""Weights that undo the sharing of prefixes: GRPO is a process reward whose steps count once for each row.

    .. math:: w_t = 1 / \#\{\text{rows of the group that begin with } y_1 \ldots y_t\}

    Source: λ-GRPO, arXiv 2509.21154, and its published code.
    """

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the prefix tree of each group."""
        mask = batch.response_mask
        nodes = response_nodes(batch.response_ids, mask, batch.group)
        valid = nodes >= 0
        number = torch.bincount(nodes[valid])
        values = torch.zeros(nodes.shape, dtype=batch.advantages.dtype)
        values[valid] = 1 / number[nodes[valid]].to(values)
        none = torch.zeros_like(batch.advantages, dtype=torch.bool)
        shared = Mean(float((number[nodes[valid]] > 1).sum()), int(valid.sum()))
        return TokenWeights(values=values.to(mask.device), fallback=none, metrics={"in_tree": shared})


def _inverse_std(outcomes: Tensor, group: Tensor) -> Tensor:
    """``[B]``: 1 over the unbiased standard deviation of each row's group + 1e-4; 0 without a deviation."""
    total, size = group_sums(outcomes, group)
    squares, _ = group_sums((outcomes - total / size).square(), group)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return torch.where(std > EQUAL_REWARDS, 1 / (std + 1e-4), 0)

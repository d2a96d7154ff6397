"""Baselines of the group beside those of the package, and combinations of them, for benchmarks/credit_gradients.py.

Each is a credit method whose whole advantage is its additive stage. Groups whose rewards are equal have none.

Shapes: ``B`` rows, ``T`` response tokens, ``S`` states.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import CreditContext, TokenCredit, TokenWeights
from grail_lightning.credit.measure import gradient_energies
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import response_nodes
from grail_lightning.step.advantages import token_advantages

Kind = Literal["position", "row", "tree"]
_EPS = 1e-8


class LeftOut(TokenCredit):
    r"""A baseline from the *other* rows of the group, so that it is no function of the row itself: no bias.

    - ``position``: ``B_t = Σ_j W_jt r_j / Σ_j W_jt``, ``W`` the gradient energy up to ``t``: `OptimalBaseline`.
    - ``row``: the same with the energy of the whole row: one baseline a row.
    - ``tree``: the mean reward of the rows that share the prefix, shrunk to that of the state before by one row.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        mask, rewards = batch.response_mask, batch.rewards.double()
        live = torch.isin(batch.group, batch.group[batch.advantages != 0])
        same = (batch.group[:, None] == batch.group).double()
        others = same - torch.eye(len(batch), dtype=torch.float64)
        mean = (others @ rewards) / others.sum(1).clamp(min=1)
        if self.kind == "tree":
            baseline = tree_baseline(batch, mean)
        else:
            energy = (gradient_energies(policy, batch, context, live.nonzero().flatten()) + _EPS) * mask
            if self.kind == "position":
                weight = energy.cumsum(1) * mask
            else:
                weight = energy.sum(1, keepdim=True).expand(mask.shape)
            total = others @ weight
            baseline = torch.where(total > 0, (others @ (weight * rewards[:, None])) / total, mean[:, None])
        return added((rewards[:, None] - baseline) * mask * live[:, None], batch)


def tree_baseline(batch: RolloutBatch, mean: Tensor) -> Tensor:
    """``[B, T]``: of the state before each token, from the other rows that reach it; `mean` ``[B]`` is that of none."""
    rewards, after = batch.rewards.double(), response_nodes(batch.response_ids, batch.response_mask, batch.group)
    number = int(after.max()) + 1
    before = torch.cat([number + batch.group[:, None], after[:, :-1]], 1)
    number += int(batch.group.max()) + 1
    baseline, present = torch.zeros(before.shape, dtype=torch.float64), mean.clone()
    for t in range(before.shape[1]):
        inside = batch.response_mask[:, t]
        state = torch.where(inside, before[:, t], 0)
        none = torch.zeros(number, dtype=torch.float64)
        total = none.index_add(0, state[inside], rewards[inside])[state] - rewards
        others = none.index_add(0, state[inside], torch.ones_like(rewards)[inside])[state] - 1
        present = torch.where(inside, (total + present) / (others + 1), present)
        baseline[:, t] = present
    return baseline


class Sum(TokenCredit):
    """The token advantages of two methods added."""

    def __init__(self, one: TokenCredit, other: TokenCredit) -> None:
        self.one, self.other = one, other

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        parts = (method(policy, batch, context) for method in (self.one, self.other))
        one, other = (token_advantages(batch.advantages, part) for part in parts)
        return added(one + other, batch)


class PromptWeights(TokenCredit):
    """Uniform credit with prompts weighted as by `objective.baseline: 0`: ``(1 - p^(G-1)) / (1 - 1/G)`` times GRPO's.

    Without its all-right groups, the expected step of right rollouts alone weighs prompts differently. This control has
    these weights and the mean as its baseline; ``p`` is the share of right rows of the group.
    """

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        same = (batch.group[:, None] == batch.group).double()
        size = same.sum(1)
        factor = (1 - ((same @ batch.rewards.double()) / size) ** (size - 1)) / (1 - 1 / size)
        values = factor[:, None] * batch.response_mask
        return TokenWeights(values=values.to(batch.advantages), fallback=torch.zeros_like(batch.finished))


def added(advantages: Tensor, batch: RolloutBatch) -> TokenWeights:
    """These token advantages in place of those of the group."""
    none = torch.zeros_like(batch.response_mask, dtype=batch.advantages.dtype)
    return TokenWeights(
        values=none, additive=advantages.to(batch.advantages), fallback=torch.zeros_like(batch.finished)
    )

"""The optimal token baseline: a baseline of the group for each token position.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights, check_choice
from grail_lightning.credit.measure import gradient_energies
from grail_lightning.policy import Policy

Tail = Literal["zero", "own"]
_EPS = 1e-8


class OptimalBaseline(TokenCredit):
    r"""Replaces the group's mean by a baseline for each position, which weighs rows by the variance of their gradient.

    .. math:: A_{it} = r_i - B_t, \qquad B_t = \frac{\sum_j r_j W_{jt}}{\sum_j W_{jt}}, \qquad
              W_{jt} = \sum_{k \le t} \Bigl(1 - 2 \pi_{jk} + \sum_v \pi_k(v)^2\Bigr)

    over the rows ``j`` of the group that have a token ``t``. ``π`` is the policy at the sampling temperature. The
    summand is the squared norm of the gradient of a token's log-probability with respect to its logits. The whole
    advantage is the additive stage, so `objective.scale_rewards` does not act. Groups without an advantage have none
    and need no forward pass.

    Args:
        tail: The baseline of tokens at positions that only the group's longest row reaches: 0, or the row's own reward,
            so that these tokens have no advantage. Published is zero.

    Source: the published code of verl, `compute_optimal_token_baseline_advantage`. There ``1e-8`` is added to the
    denominator alone; here to each ``W``, so that the baseline of certain tokens is the mean reward, not 0.
    """

    def __init__(self, tail: Tail = "zero") -> None:
        check_choice("tail", tail, Tail)
        self.tail = tail

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0, and the advantage as an additive stage."""
        mask, rewards = batch.response_mask, batch.rewards.double()
        live = torch.isin(batch.group, batch.group[batch.advantages != 0])
        energy = gradient_energies(policy, batch, context, live.nonzero().flatten())
        additive = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        for group in sorted(set(batch.group[live].tolist())):
            rows = batch.group == group
            weight = (energy[rows].cumsum(1) + _EPS) * mask[rows]
            baseline = (weight * rewards[rows, None]).sum(0) / weight.sum(0).clamp(min=_EPS)
            if self.tail == "zero":
                baseline = torch.where(mask[rows].sum(0) > 1, baseline, 0)
            additive[rows] = (rewards[rows, None] - baseline) * mask[rows]
        counted = live[:, None] & mask
        return TokenWeights(
            values=torch.zeros_like(mask, dtype=batch.advantages.dtype),
            additive=additive.to(batch.advantages.dtype),
            fallback=torch.zeros_like(live),
            metrics={"gradient_energy": Mean(float(energy[counted].sum()), float(counted.sum()))},
        )

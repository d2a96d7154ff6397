"""Advantages of rollouts relative to their group.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit.base import CreditContext
from grail_lightning.distributed.sharding import gathered
from grail_lightning.functional.advantages import EQUAL_REWARDS, energy_baselines, group_advantages
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_gather_rows
from grail_lightning.step.loss import loss_mask
from grail_lightning.step.options import Objective


def compute_advantages(
    batch: GradedBatch, group_size: int, objective: Objective, policy: Policy, context: CreditContext
) -> RolloutBatch:
    """The batch with its rollouts' advantages ``[B]``: rewards less the baseline of the group.

    Statistics of the batch are those of all ranks. `objective.baseline: energy` needs the policy: it weighs rewards by
    the squared norms of gradients.
    """
    rewards, scale = batch.rewards, objective.scale_rewards
    std = all_gather_rows(rewards).std() if scale == "batch" else None
    means = all_gather_rows(rewards.double().reshape(-1, group_size).mean(1)) if scale == "bnpo" else None
    if objective.baseline == "energy":
        baseline: float | Tensor = _energy_baselines(batch, group_size, objective, policy, context)
    else:
        baseline = float(objective.baseline)
    advantages = group_advantages(
        rewards, group_size, scale, std, means, baseline=baseline, train_equal=objective.train_equal
    )
    return batch.with_advantages(advantages)


def _energy_baselines(
    batch: GradedBatch, group_size: int, objective: Objective, policy: Policy, context: CreditContext
) -> Tensor:
    """``[M]``: `energy_baselines`, with the energies of the tokens in the loss, in groups with different rewards."""
    from grail_lightning.credit.measure import gradient_energies

    groups, mask = batch.rewards.reshape(-1, group_size), loss_mask(batch, objective)
    mixed = (groups.amax(1) - groups.amin(1) > EQUAL_REWARDS).repeat_interleave(group_size) & mask.any(1)
    with gathered(policy):
        tokens = gradient_energies(policy, batch, context, mixed.nonzero().flatten())
    energies = tokens.masked_fill(~mask, 0).sum(1)
    if objective.aggregation == "grpo":  # It divides the gradient of a row by the row's length.
        energies = energies / mask.sum(1).clamp(min=1).square()
    pooled = all_gather_rows(batch.rewards[mixed]), all_gather_rows(energies[mixed])
    return energy_baselines(batch.rewards, mask.any(1), group_size, *pooled)

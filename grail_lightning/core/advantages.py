r"""Estimators of the advantage: what the reward of a rollout is worth beside those of its group (`model.advantage`).

An estimator is called once a batch. Credit methods then distribute each advantage over the tokens of its rollout.

Shapes: ``B`` rows (rollouts), ``M`` groups of this rank, ``G`` rows of a group, ``K`` reward functions, ``T`` response
tokens. Rows of one group stand next to each other. Rows without a reward (NaN) are in no statistic and have 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.credit.service import Service
from grail_lightning.core.functional.advantages import (
    EQUAL_REWARDS,
    SCALE_EPS,
    Scaling,
    group_advantages,
    leave_one_out_factor,
    reward_ranges,
    standardised_values,
)
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import GradedBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_gather_rows

Scale = Literal["none", "group", "batch"]
BatchScale = Literal["none", "batch"]


@dataclass(frozen=True, kw_only=True)
class AdvantageContext:
    """What an estimator may ask for beside the batch.

    Attributes:
        policy: The policy before the update.
        credit: The context of passes through the policy: optimiser step, token budget, temperature.
        mask: ``[B, T]`` bool, the tokens in the loss.
        row_scale: ``[B]`` float64, the factor that the aggregation gives to a row for its own length.
    """

    policy: Policy
    credit: CreditContext
    mask: Tensor
    row_scale: Tensor


class AdvantageEstimator(ABC):
    """The base class of estimators; a class of your own is named by its import path.

    Attributes:
        trains_equal_groups: Whether a group whose rewards are all equal may have advantages.
        runs_policy: Whether it may run the policy or the models of its services. Their sharded weights (FSDP2) are then
            whole while it is called, for which a device may have no room. Those of the package set it to False where
            they do not; a subclass of one that runs it sets True.
    """

    trains_equal_groups: bool = False
    runs_policy: bool = True

    @property
    def services(self) -> tuple[type[Service], ...]:
        """The classes of the services that it gets from `context.credit.service`, such as `FrozenReference`."""
        return ()

    @abstractmethod
    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """The advantages of the rollouts.

        It is called on every rank with this rank's rows, which may be none, so all ranks reach its collectives.

        Args:
            batch: The graded rollouts; `batch.rewards` ``[B]`` float64 and `batch.scored` ``[B]`` bool.
            group_size: ``G``; rows of one group stand next to each other.
            context: What else it may ask for.

        Returns:
            ``[B]``, 0 for rows without a reward, and in groups in which fewer than two rows have one.
        """

    def dead_groups(self, batch: GradedBatch) -> Tensor:
        """``[M]`` bool on the CPU: the groups that `execution.refill_rounds` replaces.

        By default those whose rows are all right or all wrong, as in DAPO. Where the reward is correctness, these are
        the groups of equal rewards. With a shaped reward such a group may have advantages; it is replaced all the same.
        """
        return same_verdict_groups(batch)


@dataclass(eq=False)
class GroupMean(AdvantageEstimator):
    r"""The reward less the mean of its group: GRPO's advantage, and that of Dr. GRPO without a divisor.

    .. math:: A_i = \frac{r_i - c\,\bar r_{group}}{s + 10^{-4}}, \qquad
              \text{with the scale "none" } A_i = r_i - c\,\bar r_{group}

    Args:
        scale: The divisor ``s``: none; the unbiased standard deviation of the group, or of the batch over all ranks.
        share: The share ``c`` of the mean that is subtracted. 1 is GRPO's. 0 trains on right rollouts alone where wrong
            ones have the reward 0.
        train_equal: Whether groups whose rewards are all equal are trained on, where a share below 1 leaves an
            advantage.

    Raises:
        ValueError: If `share` is outside [0, 1], or if `train_equal` has nothing to act on.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr. GRPO, arXiv 2503.20783, section 3.
    """

    runs_policy = False
    scale: Scale = "none"
    share: float = 1.0
    train_equal: bool = False

    def __post_init__(self) -> None:
        check_options(self, "advantage", scale=Scale, share="[0, 1]")
        if self.train_equal and (self.share == 1 or self.scale != "none"):
            raise ValueError(
                "`advantage.train_equal` needs an `advantage.share` below 1, since groups of equal rewards have no "
                "advantage otherwise, and `advantage.scale: none`, since they have no deviation to divide by, but got "
                f"{self.share} and {self.scale}."
            )
        self.trains_equal_groups = self.train_equal

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        return scaled_group_advantages(batch, group_size, self.scale, float(self.share), train_equal=self.train_equal)


@dataclass(eq=False)
class LeaveOneOut(AdvantageEstimator):
    r"""The reward less the mean of the *other* rows of the group (RLOO).

    .. math:: A_i = r_i - \frac{1}{n-1} \sum_{j \ne i} r_j = \frac{n}{n-1}\,(r_i - \bar r_{group})

    ``n`` is the number of rows of the group that have a reward.

    Args:
        scale: none; or batch, the unbiased standard deviation of these advantages over the batch of all ranks + 1e-4.

    Source: RLOO, arXiv 2402.14740.
    """

    runs_policy = False
    scale: BatchScale = "none"

    def __post_init__(self) -> None:
        check_options(self, "advantage", scale=BatchScale)

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        advantages = scaled_group_advantages(batch, group_size, dtype=torch.float64)
        advantages = advantages * leave_one_out_factor(batch.rewards, group_size)
        return (
            advantages / (_std_over_ranks(advantages, batch) + SCALE_EPS) if self.scale == "batch" else advantages
        ).float()


@dataclass(eq=False)
class BatchNormalised(AdvantageEstimator):
    r"""The reward less the mean of its group, divided by the standard deviation of these differences over the batch.

    .. math:: A_i = \frac{r_i - c\,\bar r_{group}}{\mathrm{std}_j(r_j - c\,\bar r_{group(j)}) + 10^{-4}}

    The deviation is unbiased, over all ranks. A group whose rewards are all equal counts with differences of 0.

    Args:
        share: The share ``c`` of the mean that is subtracted.

    Source: REINFORCE++-baseline, arXiv 2501.03262.
    """

    runs_policy = False
    share: float = 1.0

    def __post_init__(self) -> None:
        check_options(self, "advantage", share="[0, 1]")

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        advantages = scaled_group_advantages(batch, group_size, baseline=float(self.share), dtype=torch.float64)
        return _standardised(advantages, batch).float()


@dataclass(eq=False)
class BNPO(AdvantageEstimator):
    r"""The reward less the mean of its group, times `beta_scale`: 1 over the density of a Beta distribution.

    The distribution is fitted to the mean rewards of all groups of the batch, over all ranks, which must lie in [0, 1].

    Args:
        share: The share of the mean that is subtracted.

    Raises:
        ValueError: If the mean reward of a group lies outside [0, 1].

    Source: BNPO, arXiv 2506.02864.
    """

    runs_policy = False
    share: float = 1.0

    def __post_init__(self) -> None:
        check_options(self, "advantage", share="[0, 1]")

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        return scaled_group_advantages(batch, group_size, "bnpo", float(self.share))


@dataclass(eq=False)
class GDPO(AdvantageEstimator):
    r"""Each reward function's values are standardised in the group by themselves, then summed with their weights.

    .. math:: x_i = \sum_k w_k \frac{r_{ik} - \bar r_k}{s_k + 10^{-4}}, \qquad
              A_i = \frac{x_i}{\mathrm{std}_j(x_j) + 10^{-4}}

    ``\bar r_k`` and ``s_k`` are the group's mean and unbiased standard deviation of the values of function ``k``, which
    skip values of None. So a reward with small differences acts as much as one with large ones, and rewards whose
    totals are equal are told apart. The mean of ``x`` is 0. A task whose `reward` is its own has one function, this.

    Args:
        scale_batch: Whether ``x`` is divided by its standard deviation over the batch of all ranks.

    Source: GDPO, arXiv 2601.05242.
    """

    runs_policy = False
    scale_batch: bool = True
    trains_equal_groups = True  # Equal totals may be made of different values.

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        values, weights = _values_and_weights(batch)
        summed = (standardised_values(values, group_size) * weights).nansum(1)
        dead = self._is_dead(values, group_size).repeat_interleave(group_size)
        few = (batch.scored.reshape(-1, group_size).sum(1) < 2).repeat_interleave(group_size)
        advantages = summed.masked_fill(dead | few | ~batch.scored, 0)
        return (
            advantages / (_std_over_ranks(advantages, batch) + SCALE_EPS) if self.scale_batch else advantages
        ).float()

    def dead_groups(self, batch: GradedBatch) -> Tensor:
        """Those in which the values of each function are all equal."""
        if not len(batch):
            return torch.zeros(0, dtype=torch.bool)
        values, _ = _values_and_weights(batch)
        return self._is_dead(values, len(batch) // len(torch.unique(batch.group))).cpu()

    def _is_dead(self, values: Tensor, group_size: int) -> Tensor:
        groups = values.reshape(-1, group_size, values.shape[1]).transpose(1, 2)
        ranges = reward_ranges(groups.reshape(-1, group_size)).reshape(len(groups), -1)
        return (ranges <= EQUAL_REWARDS).all(1)


def same_verdict_groups(batch: GradedBatch) -> Tensor:
    """``[M]`` bool on the CPU: groups whose rows are all right or all wrong, in the order of the rows.

    Rows without a reward are neither; a group with fewer than two others teaches nothing.
    """
    if not len(batch):
        return torch.zeros(0, dtype=torch.bool)
    number = len(torch.unique(batch.group))
    correct, scored = (rows.cpu().reshape(number, -1) for rows in (batch.correct, batch.scored))
    right = (correct & scored).sum(1)
    return (right == 0) | (right == scored.sum(1))


def scaled_group_advantages(
    batch: GradedBatch,
    group_size: int,
    scale: Scaling = "none",
    baseline: float | Tensor = 1.0,
    *,
    train_equal: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`group_advantages` with the statistics of all ranks; a number as `baseline` is a share of the group's mean."""
    rewards, std, means = batch.rewards.double(), None, None
    if scale == "batch":
        std = _std_over_ranks(rewards, batch)
    elif scale == "bnpo":
        means = rewards.reshape(-1, group_size).nanmean(1)
        means = all_gather_rows(means[~means.isnan()])
    return group_advantages(
        rewards, group_size, scale, std, means, baseline=baseline, train_equal=train_equal, dtype=dtype
    )


def _std_over_ranks(values: Tensor, batch: GradedBatch) -> Tensor:
    """The unbiased standard deviation of ``values [B]`` over all ranks' rows that have a reward; 0 for a single one."""
    everyone = all_gather_rows(values[batch.scored])
    return everyone.std() if len(everyone) > 1 else everyone.new_zeros(())


def _standardised(advantages: Tensor, batch: GradedBatch) -> Tensor:
    """The advantages ``[B]`` over their standard deviation in the batch of all ranks + 1e-4."""
    return advantages / (_std_over_ranks(advantages, batch) + SCALE_EPS)


def _values_and_weights(batch: GradedBatch) -> tuple[Tensor, Tensor]:
    """``[B, K]`` each, float64: the values of the reward functions, NaN for none, and their weights.

    The last column is the reward of rows whose task has no functions.
    """
    parts = [*batch.reward_values.values()]
    totals = batch.rewards.double()
    if parts:
        totals = totals.masked_fill(~torch.stack(parts).isnan().all(0), torch.nan)
    weights = [batch.reward_weights[name].nan_to_num(nan=0.0) for name in batch.reward_values]
    return torch.stack([*parts, totals], 1).double(), torch.stack([*weights, torch.ones_like(totals)], 1).double()

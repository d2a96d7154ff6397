"""The estimator of the advantage whose baseline weighs rewards by the energy of their gradients.

Shapes: ``B`` rows (rollouts), ``M`` groups of this rank, ``G`` rows of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grail_lightning.core.advantages import AdvantageContext, AdvantageEstimator, Scale, scaled_group_advantages
from grail_lightning.core.functional.advantages import EQUAL_REWARDS, energy_baselines, reward_ranges
from grail_lightning.core.rollout.batch import GradedBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_gather_rows


@dataclass(eq=False)
class EnergyBaseline(AdvantageEstimator):
    r"""The reward less the baseline of least noise, if the gradient of a row depends on its reward alone.

    The baseline weighs the rewards of the group by the mean squared norm of the gradients of the batch's rows with the
    same reward (`energy_baselines`). It needs a further forward pass.

    Args:
        scale: The divisor; see `GroupMean`.

    Source: the optimal constant baseline of Greensmith et al., JMLR 5 (2004), section 4; pooling is ours.
    """

    scale: Scale = "none"

    def __post_init__(self) -> None:
        check_options(self, "advantage", scale=Scale)

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """See `AdvantageEstimator`."""
        return scaled_group_advantages(batch, group_size, self.scale, self._baselines(batch, group_size, context))

    def _baselines(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """``[M]``: `energy_baselines`, with the energies of tokens in the loss, in groups with different rewards."""
        from grail_lightning.core.credit.measure import gradient_energies

        groups, mask = batch.rewards.reshape(-1, group_size), context.mask
        mixed = (reward_ranges(groups) > EQUAL_REWARDS).repeat_interleave(group_size) & mask.any(1)
        tokens = gradient_energies(context.policy, batch, context.credit, mixed.nonzero().flatten())
        energies = tokens.masked_fill(~mask, 0).sum(1) * context.row_scale.square()
        pooled = all_gather_rows(batch.rewards[mixed]), all_gather_rows(energies[mixed])
        return energy_baselines(batch.rewards, mask.any(1), group_size, *pooled)

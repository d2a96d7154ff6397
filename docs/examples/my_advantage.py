"""An estimator of the advantage: the reward less the median of its group, which one outlier does not move."""

from torch import Tensor

from grail_lightning import AdvantageContext, AdvantageEstimator, GradedBatch


class GroupMedian(AdvantageEstimator):
    """``A_i = r_i − median(r)``; rows without a reward have 0."""

    def __call__(self, batch: GradedBatch, group_size: int, context: AdvantageContext) -> Tensor:
        """Advantages ``[B]`` of rows of which those of one group stand next to each other."""
        groups = batch.rewards.reshape(-1, group_size)
        centred = groups - groups.nanmedian(1, keepdim=True).values
        return centred.reshape(-1).masked_fill(~batch.scored, 0)

"""The records that the module passes to callbacks, and the evaluation options that it receives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.credit.base import TokenWeights


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The options with which validation and test sample; the `Evaluation` callback sets them."""

    num_samples: int
    sampling: Sampling


class StepOutput:
    """The output of a step for callbacks: graded rollouts, their token weights, and the step's figures.

    This is no dataclass, because Lightning traverses dataclasses and refuses the frozen ones inside.
    """

    def __init__(
        self,
        batch: GradedBatch,
        weights: TokenWeights | None = None,
        metrics: dict[str, float] | None = None,
    ) -> None:
        self.batch, self.weights, self.metrics = batch, weights, metrics or {}

    @property
    def advantages(self) -> Tensor | None:
        """``[B]``; None for a batch that is only evaluated."""
        return self.batch.advantages if isinstance(self.batch, RolloutBatch) else None

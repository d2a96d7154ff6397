"""What passes between the module and its callbacks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.credit.base import TokenWeights


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How validation and test sample; the `Evaluation` callback sets it."""

    num_samples: int
    sampling: Sampling


class StepOutput:
    """What a step hands to callbacks: graded rollouts, their token weights, and the step's figures.

    Not a dataclass: Lightning walks through those and refuses the frozen ones inside.
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
        """``[B]``; None of a batch that is only evaluated."""
        return self.batch.advantages if isinstance(self.batch, RolloutBatch) else None

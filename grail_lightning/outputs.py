"""What passes between the module and its callbacks."""

from __future__ import annotations

from dataclasses import dataclass

from grail_lightning.answers.verifier import Verdict
from grail_lightning.rollout import RolloutBatch, Sampling, TokenWeights


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How validation and test sample; the `Evaluation` callback sets it."""

    num_samples: int
    sampling: Sampling


class StepOutput:
    """What a step hands to callbacks: graded rollouts, their verdicts, and their token weights.

    Not a dataclass: Lightning walks through those and refuses the frozen ones inside.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        verdicts: list[Verdict],
        weights: TokenWeights | None = None,
        metrics: dict[str, float] | None = None,
    ) -> None:
        self.batch, self.verdicts, self.weights, self.metrics = batch, verdicts, weights, metrics or {}

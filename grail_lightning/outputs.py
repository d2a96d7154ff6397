"""What passes between the module and its callbacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def metric_names(datasets: Iterable[str]) -> dict[str, str]:
    """Each dataset's name as a part of a metric's: no slash, no @.

    Raises:
        ValueError: If two datasets would be reported under one name.
    """
    names: dict[str, str] = {}
    for dataset in dict.fromkeys(datasets):
        name = re.sub(r"[^\w.+-]", "_", dataset)
        twin = next((other for other, taken in names.items() if taken == name), None)
        if twin is not None:
            raise ValueError(
                f"The datasets {twin!r} and {dataset!r} must differ in more than signs that no metric's name can have, "
                f"but got `{name}` for both. Set `name` of one of them."
            )
        names[dataset] = name
    return names

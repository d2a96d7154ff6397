"""The records that the module passes to callbacks, and the evaluation options that it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.credit.base import TokenWeights
from grail_lightning.runtime.seeds import SeedKey, sample_seed
from grail_lightning.tasks.problem import Prompt, problem_id


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """The options with which validation and test sample; the `Evaluation` callback sets them.

    Attributes:
        num_samples: The number of responses to each problem.
        sampling: Their sampling options.
        done: The batches whose samples an interrupted evaluation has kept, by the numbers of loader and batch. They are
            not sampled again: their step returns None.
    """

    num_samples: int
    sampling: Sampling
    done: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)


def validation_key(dataloader: int, batch: int) -> SeedKey:
    """The key of the random numbers of a batch of validation, the same in every validation."""
    return "eval", dataloader, batch


def test_seeds(prompts: Sequence[Prompt], num_samples: int) -> list[int]:
    """The seed of each response of a test, which depends on the problem and on the number of the sample alone."""
    return [sample_seed(problem_id(prompt), number) for prompt in prompts for number in range(num_samples)]


class StepOutput:
    """The output of a step for callbacks: graded rollouts, their token weights, and the step's figures.

    This is no dataclass, because Lightning traverses dataclasses and refuses the frozen ones inside.
    """

    def __init__(
        self, batch: GradedBatch, weights: TokenWeights | None = None, metrics: dict[str, float] | None = None
    ) -> None:
        self.batch, self.weights, self.metrics = batch, weights, metrics or {}

    @property
    def advantages(self) -> Tensor | None:
        """``[B]``; None for a batch that is only evaluated."""
        return self.batch.advantages if isinstance(self.batch, RolloutBatch) else None

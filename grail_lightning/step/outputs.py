"""What the module passes to callbacks and loggers, and the evaluation options that it receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch, Sampling
from grail_lightning.credit.base import TokenWeights
from grail_lightning.runtime.seeds import sample_seed
from grail_lightning.tasks.problem import Prompt, problem_id

# TensorBoard shows a group for whatever stands before the first slash of a tag: ``train`` (rollouts and their rewards),
# ``policy`` (the update), ``credit`` (token weights), ``speed`` (seconds, tokens, memory), and ``val`` and ``test``
# (held-out problems).
GROUPS = ("train", "policy", "credit", "speed", "val", "test")
# The group of a figure, by what stands before the first slash of its name, as users of GRPO know it.
GROUP_OF = {
    name: group
    for group, names in {
        "train": "reward reward_std rewards accuracy verdict completions episodes refill frac_reward_zero_std "
        "frac_correct_zero_std",
        "policy": "loss grad_norm learning_rate kl distillation_kl clip_ratio sampling entropy entropy_sampled",
        "speed": "time step_time tokens_per_second num_tokens shared_tokens peak_memory_gb",
    }.items()
    for name in names.split()
}
# The figures of a step that progress bars show and callbacks can monitor; the others go to the loggers alone.
SHOWN = ("reward", "accuracy")


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


def tag(figure: str) -> str:
    """The tag of a figure: its group and its name; a name that begins with a group is a tag already.

    A figure without a group, of a user's own module, belongs to ``train``.

    >>> tag("reward"), tag("clip_ratio/low_mean"), tag("credit/top10_mass")
    ('train/reward', 'policy/clip_ratio/low_mean', 'credit/top10_mass')
    """
    first, slash, _ = figure.partition("/")
    if slash and first in GROUPS:
        return figure
    return f"{GROUP_OF.get(first, 'train')}/{figure}"

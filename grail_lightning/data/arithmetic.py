"""The data module of generated chains of additions and subtractions."""

from __future__ import annotations

from grail_lightning.data.generated import PROBLEM_SPLITS, split_sizes
from grail_lightning.data.kept import Kept, kept_rollouts
from grail_lightning.data.loaders import PromptSet
from grail_lightning.data.modules import PromptData, Split
from grail_lightning.data.rows import prompt_of
from grail_lightning.tasks.arithmetic import ArithmeticTask, ProblemSpace


class ArithmeticData(PromptData):
    """Generated chains of additions and subtractions, with a label for every step of a response.

    Training, validation and test problems are disjoint, whatever the seeds and sizes. Prediction uses the test split.

    Args:
        num_train: The number of training problems.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        problems: The space of problems: numbers of terms, operands and operators. The packaged policy `arithmetic`
            knows five terms, `chains` 5 to 10, `long_chains` 15 to 20.
        seed: The seed that selects the problems. It is not the run's seed, so that runs with different seeds are tested
            on the same problems.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task, which makes prompts of problems and rewards answers; default `ArithmeticTask`.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.

    Raises:
        ValueError: If a number is out of range; in `setup` if there are fewer such problems than asked for.
    """

    def __init__(
        self,
        num_train: int = 20_000,
        num_val: int = 512,
        num_test: int = 512,
        problems: ProblemSpace = ProblemSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: ArithmeticTask | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(prompts_per_batch, eval_prompts_per_batch)
        self.problems, self.seed = problems, seed
        self.sizes = split_sizes(num_train, num_val, num_test)
        self.task, self.kept = task or ArithmeticTask(), kept

    def load(self, split: Split) -> list[PromptSet]:
        """Draw the problems of a split."""
        if split == "predict" and self.kept is not None:
            return kept_rollouts(self.kept, self.task, self.trainer)
        drawn = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        return [PromptSet("arithmetic", [prompt_of(self.task, {"problem": p.expression}) for p in drawn])]

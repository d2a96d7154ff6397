"""What data modules of generated problems share: their splits, and a task with tools in plain tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from grail_lightning.answers.find import Marker
from grail_lightning.core.data.loaders import Curriculum
from grail_lightning.core.data.modules import Split
from grail_lightning.core.data.rows import FewShot
from grail_lightning.core.data.sources import DatasetSpec, Table
from grail_lightning.core.data.tables import Kept, TableData
from grail_lightning.core.records.task import Task
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.tasks.environment import Environment, EnvironmentTask
from grail_lightning.worlds.splits import ProblemSplit

_PROBLEM_SPLITS: dict[Split, ProblemSplit] = {"train": "train", "val": "validation", "test": "test", "predict": "test"}


class Problems(Protocol):
    """A space of problems."""

    def sample(self, num_problems: int, split: ProblemSplit, seed: int = 0) -> Sequence[Mapping[str, Any]]:
        """Different problems of one split, always the same for the same arguments, as rows of a table."""


class GeneratedData(TableData):
    """The base class of data modules that generate their problems.

    Training, validation and test problems are disjoint, whatever the seeds and sizes. Prediction uses the test split.

    Args:
        dataset: The dataset that the generated rows are, with the columns that are used.
        problems: The space of problems.
        task: The task, which makes prompts of problems and rewards answers.
        num_train: The number of training problems.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        seed: The seed that selects the problems. It is not the run's seed, so that runs with different seeds are tested
            on the same problems.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        few_shot: Worked examples before each question, where problems have solutions; none by default.
        curriculum: Easy problems first, by a column; by default all problems from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
    """

    disjoint_splits = True

    def __init__(
        self,
        dataset: DatasetSpec,
        problems: Problems,
        task: Task,
        num_train: int = 20_000,
        num_val: int = 256,
        num_test: int = 256,
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        few_shot: FewShot | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        sizes = prompts_per_batch, eval_prompts_per_batch
        super().__init__(task, *sizes, few_shot=few_shot, curriculum=curriculum, kept=kept)
        self.dataset, self.problems, self.seed = dataset, problems, seed
        self.sizes: dict[Split, int] = {"train": num_train, "val": num_val, "test": num_test, "predict": num_test}
        for split in ("train", "val", "test"):
            check_option(f"num_{split}", self.sizes[split], "[1, inf)")

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The generated problems of a split, as one table."""
        drawn_from = _PROBLEM_SPLITS[split]
        rows = self.problems.sample(self.sizes[split], drawn_from, self.seed)
        # With its split, since worked examples of the training problems must not cost evaluations their first rows.
        return [(replace(self.dataset, split=drawn_from), Table(f"{self.dataset.path} ({split})", rows))]


def tags_task(environment: Callable[[], object], answer: Marker) -> EnvironmentTask:
    """A task whose policy knows how to call the tools, in plain tags, and how to answer."""
    return EnvironmentTask(
        cast("type[Environment]", environment),  # One by its methods, which mypy does not see.
        calls="tags",
        instruction="",
        tool_instruction="",
        answer=answer,
        compare="text",
    )

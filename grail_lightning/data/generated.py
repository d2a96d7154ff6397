"""The data modules of generated problems: sums, word problems, questions to look up, functions to write, charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from grail_lightning.answers import Marker
from grail_lightning.data.loaders import Curriculum
from grail_lightning.data.modules import Split
from grail_lightning.data.rows import FewShot
from grail_lightning.data.sources import DatasetSpec, Table
from grail_lightning.data.tables import Kept, TableData
from grail_lightning.environments.charts import Charts
from grail_lightning.environments.search import Search
from grail_lightning.runtime.checks import check_option
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.arithmetic import ArithmeticTask, ProblemSpace, ProblemSplit
from grail_lightning.tasks.base import Task
from grail_lightning.tasks.charts import CHART_ANSWER, ChartSpace
from grail_lightning.tasks.code import CodeTask
from grail_lightning.tasks.environment import Environment, EnvironmentTask
from grail_lightning.tasks.functions import FunctionSpace
from grail_lightning.tasks.search import SEARCH_ANSWER, FactbookSpace, SearchSpace
from grail_lightning.tasks.words import WordProblemSpace

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


class ArithmeticData(GeneratedData):
    """Generated chains of additions and subtractions, with a label for every step of a response.

    The packaged policy `arithmetic` knows five terms, `chains` 5 to 10, `long_chains` 15 to 20.

    Args:
        problems: The space of problems: numbers of terms, operands and operators.
        task: The task; default `ArithmeticTask`.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: ProblemSpace = ProblemSpace(),  # noqa: B008  (frozen)
        task: ArithmeticTask | None = None,
        num_val: int = 512,
        num_test: int = 512,
        **options: Any,
    ) -> None:
        task = task or ArithmeticTask()
        super().__init__(DatasetSpec("arithmetic"), problems, task, num_val=num_val, num_test=num_test, **options)


class WordProblemData(GeneratedData):
    """Generated word problems with worked solutions: a first task for a small pretrained model.

    The columns are `problem`, `solution`, `answer` and `steps`, so `few_shot` and `curriculum: {column: steps, …}` work
    without a file. With comparisons there is also `suggested`, see `WordProblemSpace`.

    Args:
        problems: The space of problems: numbers of steps, operands and operators, and whether persons are compared.
        task: The task; default `MathTask` whose answer follows the marker `####` and is worked out (`evaluated`).
            `WordProblemTask` also labels the steps of a response.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: WordProblemSpace = WordProblemSpace(),  # noqa: B008  (frozen)
        task: Task | None = None,
        **options: Any,
    ) -> None:
        task = task or MathTask(answer=Marker(evaluated=True))
        super().__init__(DatasetSpec("word_problems"), problems, task, **options)


class SearchData(GeneratedData):
    """Questions of several hops, generated or about the World Factbook, whose facts are looked up with `Search`.

    The graphs of facts that training, validation and test questions are about are disjoint, too. The columns are
    `problem`, `answer`, `hops`, `path` and `graph`, see `SearchSpace`, so `curriculum: {column: hops, …}` works.
    Questions of a `FactbookSpace` have solutions for `few_shot`.

    Args:
        problems: The space of questions: numbers of hops and of graphs; or a `FactbookSpace`.
        task: The task; default an `EnvironmentTask` with `Search` in plain tags and no instructions, whose answer
            follows `Answer:` and is compared as text: what the packaged policy `search` knows.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: SearchSpace | FactbookSpace = SearchSpace(),  # noqa: B008  (frozen)
        task: Task | None = None,
        **options: Any,
    ) -> None:
        tool: Callable[[], object] = Search
        if isinstance(problems, FactbookSpace):
            tool = partial(Search, problems.top_k, retriever="factbook")
        super().__init__(DatasetSpec("search"), problems, task or _in_tags(tool, SEARCH_ANSWER), **options)


class CodeData(GeneratedData):
    """Generated short functions to write, with hidden tests and a reference program.

    The columns are `problem`, `entry`, `tests`, `reference`, `tempting` and `statements`, see `FunctionSpace`, so
    `curriculum: {column: statements, …}` works.

    Args:
        problems: The space of problems: numbers of statements and of hidden tests.
        task: The task; default a `CodeTask` without an instruction, as the packaged policy `code` knows it.
        num_train: The number of training problems.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: FunctionSpace = FunctionSpace(),  # noqa: B008  (frozen)
        task: Task | None = None,
        num_train: int = 5_000,
        **options: Any,
    ) -> None:
        task = task or CodeTask(instruction="")
        super().__init__(DatasetSpec("functions"), problems, task, num_train=num_train, **options)


class ChartsData(GeneratedData):
    """Generated bar and line charts with a question each, which is answered by drawing on the picture with `Charts`.

    The columns are those of `ChartSpace.sample`, so `curriculum: {column: steps, …}` works.

    Args:
        problems: The space of questions: numbers of bars or points, and the kinds of questions.
        task: The task; default an `EnvironmentTask` with `Charts` in plain tags and no instructions, whose answer
            follows `Answer:` and is compared as text: what the packaged policy `charts` knows.
        num_train: The number of training questions.
        **options: The other arguments of `GeneratedData`.
    """

    def __init__(
        self,
        problems: ChartSpace = ChartSpace(),  # noqa: B008  (frozen)
        task: Task | None = None,
        num_train: int = 4_000,
        **options: Any,
    ) -> None:
        task = task or _in_tags(Charts, CHART_ANSWER)
        super().__init__(DatasetSpec("charts", images="image"), problems, task, num_train=num_train, **options)


def _in_tags(environment: Callable[[], object], answer: Marker) -> EnvironmentTask:
    """A task whose policy knows how to call the tools, in plain tags, and how to answer."""
    return EnvironmentTask(
        cast("type[Environment]", environment),  # One by its methods, which mypy does not see.
        calls="tags",
        instruction="",
        tool_instruction="",
        answer=answer,
        compare="text",
    )

"""The data modules of generated problems: sums, word problems, questions to look up, functions to write, charts."""

from __future__ import annotations

from typing import cast

from grail_lightning.answers import Marker
from grail_lightning.data.few_shot import FewShot
from grail_lightning.data.kept import Kept, kept_rollouts
from grail_lightning.data.loaders import Curriculum, PromptSet
from grail_lightning.data.modules import PromptData, Split
from grail_lightning.data.rows import prompt_of
from grail_lightning.data.sources import DatasetSpec, Table, check_counts
from grail_lightning.data.tables import TableData
from grail_lightning.environments.charts import Charts
from grail_lightning.environments.search import Search
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.arithmetic import ArithmeticTask, ProblemSpace
from grail_lightning.tasks.arithmetic import Split as ProblemSplit
from grail_lightning.tasks.base import Task
from grail_lightning.tasks.charts import CHART_ANSWER, ChartSpace
from grail_lightning.tasks.code import CodeTask
from grail_lightning.tasks.environment import Environment, EnvironmentTask
from grail_lightning.tasks.factbook import FactbookSpace
from grail_lightning.tasks.functions import FunctionSpace
from grail_lightning.tasks.search import SEARCH_ANSWER, SearchSpace
from grail_lightning.tasks.words import WordProblemSpace

PROBLEM_SPLITS: dict[Split, ProblemSplit] = {"train": "train", "val": "validation", "test": "test", "predict": "test"}


def _split_sizes(**numbers: int) -> dict[Split, int]:
    """The number of problems of each split; prediction has those of the test."""
    check_counts(**numbers)
    train, val, test = numbers.values()
    return {"train": train, "val": val, "test": test, "predict": test}


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
        self.sizes = _split_sizes(num_train=num_train, num_val=num_val, num_test=num_test)
        self.task, self.kept = task or ArithmeticTask(), kept

    def load(self, split: Split) -> list[PromptSet]:
        """Draw the problems of a split."""
        if split == "predict" and self.kept is not None:
            return kept_rollouts(self.kept, self.task, self.trainer)
        problems = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        return [PromptSet("arithmetic", [prompt_of(self.task, {"problem": p.expression}) for p in problems])]


class WordProblemData(TableData):
    """Generated word problems with worked solutions: a first task for a small pretrained model.

    Training, validation and test problems are disjoint, whatever the seeds and sizes. Prediction uses the test split.
    The columns are `problem`, `solution`, `answer` and `steps`, so `few_shot` and `curriculum: {column: steps, …}` work
    without a file. With comparisons there is also `suggested`, see `WordProblemSpace`.

    Args:
        num_train: The number of training problems.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        problems: The space of problems: numbers of steps, operands and operators, and whether persons are compared.
        seed: The seed that selects the problems. It is not the run's seed, so that runs with different seeds are tested
            on the same problems.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task; default `MathTask` whose answer follows the marker `####`. `WordProblemTask` also labels the
            steps of a response.
        few_shot: Worked examples before each question; none by default.
        curriculum: Easy problems first, by a column; by default all problems from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
    """

    def __init__(
        self,
        num_train: int = 20_000,
        num_val: int = 256,
        num_test: int = 256,
        problems: WordProblemSpace = WordProblemSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: Task | None = None,
        few_shot: FewShot | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        sizes = prompts_per_batch, eval_prompts_per_batch
        super().__init__(task or MathTask(answer=Marker()), *sizes, few_shot=few_shot, curriculum=curriculum, kept=kept)
        self.problems, self.seed = problems, seed
        self.sizes = _split_sizes(num_train=num_train, num_val=num_val, num_test=num_test)

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The generated problems of a split, as one table."""
        rows = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        return [(DatasetSpec("word_problems", split=PROBLEM_SPLITS[split]), Table(f"word problems ({split})", rows))]


class SearchData(TableData):
    """Questions of several hops, generated or about the World Factbook, whose facts are looked up with `Search`.

    Training, validation and test questions are disjoint, and so are the graphs of facts that they are about, whatever
    the seeds and sizes. Prediction uses the test split. The columns are `problem`, `answer`, `hops`, `path` and
    `graph`, see `SearchSpace`, so `curriculum: {column: hops, …}` works.

    Args:
        num_train: The number of training questions.
        num_val: The number of validation questions.
        num_test: The number of test questions.
        problems: The space of questions: numbers of hops and of graphs; or a `FactbookSpace`.
        seed: The seed that selects the questions. It is not the run's seed, so that runs with different seeds are
            tested on the same questions.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task; default an `EnvironmentTask` with `Search` in plain tags and no instructions, whose answer
            follows `Answer:` and is compared as text: what the packaged policy `search` knows.
        few_shot: Worked examples before each question, by `FactbookSpace` alone; none by default.
        curriculum: Easy questions first, by a column; by default all questions from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
    """

    def __init__(
        self,
        num_train: int = 20_000,
        num_val: int = 256,
        num_test: int = 256,
        problems: SearchSpace | FactbookSpace = SearchSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: Task | None = None,
        few_shot: FewShot | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        task = task or EnvironmentTask(
            cast("type[Environment]", Search),  # One by its methods, which mypy does not see.
            calls="tags",
            instruction="",
            tool_instruction="",
            answer=SEARCH_ANSWER,
            compare="text",
        )
        sizes = prompts_per_batch, eval_prompts_per_batch
        super().__init__(task, *sizes, few_shot=few_shot, curriculum=curriculum, kept=kept)
        self.problems, self.seed = problems, seed
        self.sizes = _split_sizes(num_train=num_train, num_val=num_val, num_test=num_test)

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The generated questions of a split, as one table."""
        rows = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        return [(DatasetSpec("search", split=PROBLEM_SPLITS[split]), Table(f"search ({split})", rows))]


class CodeData(TableData):
    """Generated short functions to write, with hidden tests and a reference program.

    Training, validation and test problems are disjoint, whatever the seeds and sizes. Prediction uses the test split.
    The columns are `problem`, `entry`, `tests`, `reference`, `tempting` and `statements`, see `FunctionSpace`, so
    `curriculum: {column: statements, …}` works.

    Args:
        num_train: The number of training problems.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        problems: The space of problems: numbers of statements and of hidden tests.
        seed: The seed that selects the problems. It is not the run's seed, so that runs with different seeds are tested
            on the same problems.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task; default a `CodeTask` without an instruction, as the packaged policy `code` knows it.
        curriculum: Short functions first, by a column; by default all problems from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
    """

    def __init__(
        self,
        num_train: int = 5_000,
        num_val: int = 256,
        num_test: int = 256,
        problems: FunctionSpace = FunctionSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: Task | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        task = task or CodeTask(instruction="")
        super().__init__(task, prompts_per_batch, eval_prompts_per_batch, curriculum=curriculum, kept=kept)
        self.problems, self.seed = problems, seed
        self.sizes = _split_sizes(num_train=num_train, num_val=num_val, num_test=num_test)

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The generated problems of a split, as one table."""
        rows = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        return [(DatasetSpec("functions", split=PROBLEM_SPLITS[split]), Table(f"functions ({split})", rows))]


class ChartsData(TableData):
    """Generated bar and line charts with a question each, which is answered by drawing on the picture with `Charts`.

    Training, validation and test questions are disjoint, whatever the seeds and sizes. Prediction uses the test split.
    The columns are those of `ChartSpace.sample`, so `curriculum: {column: steps, …}` works.

    Args:
        num_train: The number of training questions.
        num_val: The number of validation questions.
        num_test: The number of test questions.
        problems: The space of questions: numbers of bars or points, and the kinds of questions.
        seed: The seed that selects the questions. It is not the run's seed, so that runs with different seeds are
            tested on the same questions.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task; default an `EnvironmentTask` with `Charts` in plain tags and no instructions, whose answer
            follows `Answer:` and is compared as text: what the packaged policy `charts` knows.
        curriculum: Questions with few drawings first, by a column; by default all questions from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
    """

    def __init__(
        self,
        num_train: int = 4_000,
        num_val: int = 256,
        num_test: int = 256,
        problems: ChartSpace = ChartSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: Task | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        task = task or EnvironmentTask(
            cast("type[Environment]", Charts),
            calls="tags",
            instruction="",
            tool_instruction="",
            answer=CHART_ANSWER,
            compare="text",
        )
        super().__init__(task, prompts_per_batch, eval_prompts_per_batch, curriculum=curriculum, kept=kept)
        self.problems, self.seed = problems, seed
        self.sizes = _split_sizes(num_train=num_train, num_val=num_val, num_test=num_test)

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The generated questions of a split, as one table."""
        rows = self.problems.sample(self.sizes[split], PROBLEM_SPLITS[split], self.seed)
        spec = DatasetSpec("charts", split=PROBLEM_SPLITS[split], images="image")
        return [(spec, Table(f"charts ({split})", rows))]

"""The data module of generated word problems."""

from __future__ import annotations

from typing import Any

from grail_lightning.answers.find import Marker
from grail_lightning.core.data.sources import DatasetSpec
from grail_lightning.core.records.task import Task
from grail_lightning.core.tasks.answered import MathTask
from grail_lightning.worlds.generated import GeneratedData
from grail_lightning.worlds.words.task import WordProblemSpace


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

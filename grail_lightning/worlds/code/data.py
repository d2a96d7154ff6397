"""The data module of generated functions to write."""

from __future__ import annotations

from typing import Any

from grail_lightning.core.data.sources import DatasetSpec
from grail_lightning.core.records.task import Task
from grail_lightning.worlds.code.functions import FunctionSpace
from grail_lightning.worlds.code.task import CodeTask
from grail_lightning.worlds.generated import GeneratedData


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

"""The data module of sums: generated chains of additions and subtractions."""

from __future__ import annotations

from typing import Any

from grail_lightning.core.data.sources import DatasetSpec
from grail_lightning.worlds.generated import GeneratedData
from grail_lightning.worlds.sums.task import ArithmeticTask, ProblemSpace


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

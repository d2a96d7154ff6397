"""The data module of questions about generated charts."""

from __future__ import annotations

from typing import Any

from grail_lightning.core.data.sources import DatasetSpec
from grail_lightning.core.records.task import Task
from grail_lightning.worlds.charts.environment import Charts
from grail_lightning.worlds.charts.task import CHART_ANSWER, ChartSpace
from grail_lightning.worlds.generated import GeneratedData, tags_task


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
        task = task or tags_task(Charts, CHART_ANSWER)
        super().__init__(DatasetSpec("charts", images="image"), problems, task, num_train=num_train, **options)

"""A data module that reads CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

from grail_lightning import DatasetSpec, MathTask, Split, Table, TableData, Task


class CSVData(TableData):
    """Problems with reference answers from CSV files, one for each split, with a header line.

    Args:
        folder: The folder that holds `train.csv`, `val.csv` and so on. A split without a file has no data.
        problem: The column of the problem text.
        answer: The column of the reference answer.
        task: The task; default `MathTask`.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
    """

    def __init__(
        self,
        folder: str,
        problem: str = "problem",
        answer: str = "answer",
        task: Task | None = None,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 64,
    ) -> None:
        super().__init__(task or MathTask(), prompts_per_batch, eval_prompts_per_batch)
        self.folder, self.problem, self.answer = Path(folder), problem, answer

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The table of a split with the names of its columns."""
        path = self.folder / f"{split}.csv"
        if not path.is_file():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [(DatasetSpec(str(path), problem=self.problem, answer=self.answer, name=split), Table(str(path), rows))]

"""The rollouts that a training run keeps, as given texts for `predict`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from grail_lightning.data.loaders import PromptSet
from grail_lightning.picture import FIRST_PICTURE_ID, has_pictures
from grail_lightning.runtime.checks import check_option
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.tasks.base import Task
from grail_lightning.tasks.problem import Prompt

_COLUMNS = ["dataset", "reference", "response", "finished", "group", "token_ids", "messages", "columns"]


@dataclass(frozen=True)
class Kept:
    """The newest rollouts that the callback `KeepRollouts` wrote, while the run goes on or afterwards.

    Args:
        newest: The largest number of rollouts. Groups are not cut, unless the newest one has more.
        folder: The folder of the files; default ``rollouts`` in the folder of the run.
    """

    newest: int = 200
    folder: str | None = None

    def __post_init__(self) -> None:
        check_option("data.kept.newest", self.newest, "[1, inf)")


def kept_rollouts(kept: Kept, task: Task, trainer: Trainer | None) -> list[PromptSet]:
    """The newest kept rollouts of each dataset, which the task grades again.

    Each is a prompt with the columns `response`, `response_ids`, `finished`, `response_group` and, with an environment,
    `response_turns`, `prompt_ids` and `episode`, which `predict` takes instead of sampling.
    """
    folder = Path(kept.folder or "rollouts")
    if kept.folder is None and trainer is not None:
        folder = RunFolder(trainer).path / folder
    files = sorted(folder.glob("step_*_rank_*.parquet"), reverse=True)
    if trainer is not None:  # The run goes on writing: all ranks read the files that the first one sees.
        files = trainer.strategy.broadcast(files)
    if not files:
        raise ValueError(
            f"`data.kept` needs rollouts that a training run kept, but {folder} holds none. Train with "
            "`--trainer.callbacks+=KeepRollouts`, or name another `data.kept.folder`."
        )
    by_dataset: dict[str, list[Prompt]] = {}
    for row in _newest(files, kept.newest):
        response = {"response": row["response"], "response_ids": row["token_ids"], "finished": row["finished"]}
        response["response_group"] = row["file"], row["group"]
        if row.get("turns") is not None:
            response |= {"response_turns": row["turns"], "prompt_ids": row["prompt_ids"], "episode": row["episode"]}
        messages = json.loads(row["messages"])
        if has_pictures(messages) or max(row["token_ids"], default=0) >= FIRST_PICTURE_ID:
            raise ValueError("`data.kept` cannot read rollouts with pictures, which are not kept with them.")
        prompt = Prompt(
            messages=messages,
            reference=row["reference"],
            task=task,
            columns=json.loads(row["columns"]) | response,
            dataset=row["dataset"],
        )
        by_dataset.setdefault(prompt.dataset, []).append(prompt)
    return [PromptSet(name, prompts) for name, prompts in by_dataset.items()]


def _newest(files: list[Path], number: int) -> list[dict[str, Any]]:
    """Rows of the newest files, in whole groups."""
    newest: list[dict[str, Any]] = []
    for file in files:
        for _, rows in groupby(_rows(file), key=lambda row: row["group"]):
            group = list(rows)
            if len(newest) + len(group) > number:
                return newest or group[:number]
            newest += group
    return newest


def _rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
        turns = [name for name in ("turns", "prompt_ids", "episode") if name in table.column_names]
        rows: list[dict[str, Any]] = table.select(_COLUMNS + turns).to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(
            f"{file} must be a whole Parquet file with the columns that `KeepRollouts` writes, but got: {error} Leave "
            "it out of the folder."
        ) from None
    return [row | {"file": file.name} for row in rows]

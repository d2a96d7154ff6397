"""Callbacks that show training rollouts in TensorBoard and keep them as Parquet files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grail_lightning.callbacks.boards import takes_tables
from grail_lightning.callbacks.hooks import fast_dev_run, output_of
from grail_lightning.callbacks.records import (
    ROLLOUT_COLUMNS,
    arrow_table,
    code_block,
    cut,
    encodable,
    prompt_text,
    response_ids,
    rollout_columns,
    rollout_facts,
)
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.step.outputs import StepOutput

TABLE_COLUMNS = ("rollout", "prompt", "response", "reference")
_TRAINING_COLUMNS = {
    "step": "int64",
    "rank": "int32",
    **ROLLOUT_COLUMNS,
    "token_ids": "list<int32>",
    "messages": "string",
    "columns": "string",
}


class RolloutTable(Callback):
    """Shows a few training rollouts as text: prompt, response, reference, verdict, reward, advantage.

    TensorBoard shows them in its text panel, Weights & Biases as a table; other loggers are left alone.

    Args:
        every_n_batches: The number of batches between two panels; 0 shows none. The first batch is always shown.
        num_rollouts: The number of rollouts, which are drawn at random from the batch of the first rank.
        max_characters: The length above which the middle of a prompt or response is left out.

    Raises:
        ValueError: If a number is too small.
    """

    def __init__(self, every_n_batches: int = 10, num_rollouts: int = 4, max_characters: int = 4000) -> None:
        for name, value, least in (
            ("every_n_batches", every_n_batches, 0),
            ("num_rollouts", num_rollouts, 1),
            ("max_characters", max_characters, 1),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        self.every_n_batches, self.num_rollouts, self.max_characters = every_n_batches, num_rollouts, max_characters

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Write the panel."""
        if not self.every_n_batches or not trainer.is_global_zero or fast_dev_run(trainer):
            return
        if trainer.fit_loop.total_batch_idx % self.every_n_batches:
            return
        output, step = output_of(outputs), trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("train/rollouts", self.page(output, step), step)
            elif takes_tables(logger):
                logger.log_table("train/rollouts", list(TABLE_COLUMNS), self.table(output, step), step=step)

    def page(self, output: StepOutput, step: int) -> str:
        """A random choice of rollouts as Markdown. It depends only on the step."""
        return "\n\n".join(self._section(output, row) for row in self._rows(output, step))

    def table(self, output: StepOutput, step: int) -> list[list[str]]:
        """The same rollouts as rows of `TABLE_COLUMNS`."""
        return [
            [rollout_facts(output, row), *(cut(encodable(text), self.max_characters) for text in parts.values())]
            for row in self._rows(output, step)
            for parts in [_parts(output, row)]
        ]

    def _rows(self, output: StepOutput, step: int) -> list[int]:
        drawn = torch.randperm(len(output.batch), generator=torch.Generator().manual_seed(step))
        rows: list[int] = drawn[: self.num_rollouts].sort().values.tolist()
        return rows

    def _section(self, output: StepOutput, row: int) -> str:
        blocks = [
            f"{name}\n\n{code_block(encodable(text), self.max_characters)}"
            for name, text in _parts(output, row).items()
        ]
        return "\n\n".join([f"### {rollout_facts(output, row)}", *blocks])


def _parts(output: StepOutput, row: int) -> dict[str, str]:
    prompt = output.batch.prompts[row]
    return {"prompt": prompt_text(prompt), "response": output.batch.texts[row], "reference": prompt.reference}


class KeepRollouts(Callback):
    """Keeps all training rollouts: one Parquet file for each batch and rank, ``step_00000012_rank_00000.parquet``.

    Columns: step, rank, dataset, prompt, reference, response, reward, correct, status, advantage, finished, num_tokens,
    group (unique within step and rank), token_ids (of the response), messages (the prompt) and columns (the row of the
    dataset), both as JSON. `step` counts optimiser steps, as in TensorBoard. A resumed run adds files to the folder.
    ``pandas.read_parquet(folder)`` reads all of it, and ``predict --data.kept.newest=200`` the newest of them.

    Args:
        folder: The folder to write to; default ``rollouts`` in the folder of the run.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._path = Path()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the folder. This is a collective, so all ranks take part."""
        self._path = Path(self.folder) if self.folder else RunFolder(trainer).path / "rollouts"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Write the batch."""
        if fast_dev_run(trainer):
            return
        output = output_of(outputs)
        columns = rollout_columns(output)
        columns["step"] = [trainer.global_step] * len(output.batch)
        columns["rank"] = [trainer.global_rank] * len(output.batch)
        columns["token_ids"] = response_ids(output)
        columns["messages"] = [_json(prompt.messages) for prompt in output.batch.prompts]
        columns["columns"] = [_json(dict(prompt.columns)) for prompt in output.batch.prompts]
        name = f"step_{trainer.global_step:08d}_rank_{trainer.global_rank:05d}.parquet"
        _write_parquet(arrow_table(columns, _TRAINING_COLUMNS), self._path / name)


def _json(value: object) -> str:
    """JSON; what it has no form for, such as a date, is text."""
    return encodable(json.dumps(value, ensure_ascii=False, default=str))


def _write_parquet(table: object, file: Path) -> None:
    """Write a `pyarrow.Table`; the file appears under its name only when it is complete."""
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    pq.write_table(table, unfinished)
    os.replace(unfinished, file)

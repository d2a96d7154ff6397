"""Rollouts as rows that people read and that files keep, and the callbacks that show and keep those of training.

Text from a model is untrusted. It is escaped here so that it breaks neither a Markdown page nor a file.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grail_lightning.callbacks.hooks import fast_dev_run, output_of
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks.base import Prompt

# The types are names of pyarrow, which is imported where it is used, since help resolves the types of this file. The
# schema is fixed, so that files of different batches can be read as one table.
ROLLOUT_COLUMNS = {
    "dataset": "string",
    "prompt": "string",
    "reference": "string",
    "response": "string",
    "reward": "float32",
    "correct": "bool",
    "status": "string",
    "advantage": "float32",
    "finished": "bool",
    "num_tokens": "int32",
    "group": "int64",
}
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
        loggers: list[Any] = trainer.loggers
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("train/rollouts", self.page(output, step), step)
            elif callable(getattr(logger, "log_table", None)):  # Lightning's interface for tables.
                logger.log_table("train/rollouts", list(TABLE_COLUMNS), self.table(output, step), step=step)

    def page(self, output: StepOutput, step: int) -> str:
        """A random choice of rollouts as Markdown. It depends only on the step."""
        sections = []
        for facts, *texts in self._drawn(output, step):
            sections.append(f"### {facts}")
            blocks = [code_block(text, self.max_characters) for text in texts]
            sections += [f"{name}\n\n{block}" for name, block in zip(TABLE_COLUMNS[1:], blocks, strict=True)]
        return "\n\n".join(sections)

    def table(self, output: StepOutput, step: int) -> list[list[str]]:
        """The same rollouts as rows of `TABLE_COLUMNS`."""
        drawn = self._drawn(output, step)
        return [[facts, *(cut(text, self.max_characters) for text in texts)] for facts, *texts in drawn]

    def _drawn(self, output: StepOutput, step: int) -> list[list[str]]:
        order = torch.randperm(len(output.batch), generator=torch.Generator().manual_seed(step))
        rows: list[int] = order[: self.num_rollouts].sort().values.tolist()
        prompts, responses = output.batch.prompts, output.batch.texts
        texts = [(prompt_text(prompts[row]), responses[row], prompts[row].reference) for row in rows]
        return [[rollout_facts(output, row), *map(encodable, t)] for row, t in zip(rows, texts, strict=True)]


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


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: plain text as it is, a conversation as ``role: content`` lines."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt.messages)


def rollout_facts(output: StepOutput, row: int) -> str:
    """A rollout's verdict, reward, advantage and length in one line."""
    batch = output.batch
    facts = [re.sub(r"\W", " ", batch.verdicts[row].status), f"reward {batch.rewards[row]:.3g}"]
    if output.advantages is not None:
        facts.append(f"advantage {output.advantages[row]:+.3g}")
    return ", ".join([*facts, f"{int(batch.response_lengths[row])} tokens"])


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can hold but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, max_characters: int) -> str:
    """The text; if it is longer than `max_characters`, a line in place of its middle says how much was left out."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[len(text) - half :]}"


def code_block(text: str, max_characters: int) -> str:
    """Any text as an indented Markdown code block that shows it unchanged; see `cut` for long ones.

    Every line is indented by four spaces, so no line can end the block, whereas a text could close a fence.
    Control characters, which TensorBoard's Markdown renderer uses as internal marks, are replaced by U+FFFD.
    """
    lines = [
        "".join(c if c == "\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in line)
        for line in cut(text, max_characters).splitlines()
    ]
    return "\n".join(f"    {line}" for line in lines) if "".join(lines).strip() else "    (empty)"


def rollout_columns(output: StepOutput) -> dict[str, list[Any]]:
    """The `ROLLOUT_COLUMNS` of a step's rollouts, ``B`` values each."""
    batch = output.batch
    return {
        "dataset": [encodable(prompt.dataset) for prompt in batch.prompts],
        "prompt": [encodable(prompt_text(prompt)) for prompt in batch.prompts],
        "reference": [encodable(prompt.reference) for prompt in batch.prompts],
        "response": [encodable(text) for text in batch.texts],
        "reward": batch.rewards.tolist(),
        "correct": batch.correct.tolist(),
        "status": [verdict.status for verdict in batch.verdicts],
        "advantage": [None] * len(batch) if output.advantages is None else output.advantages.tolist(),
        "finished": batch.finished.tolist(),
        "num_tokens": batch.response_lengths.tolist(),
        "group": batch.group.tolist(),
    }


def response_ids(output: StepOutput) -> list[list[int]]:
    """The tokens of each response, without padding."""
    lengths = output.batch.response_lengths.tolist()
    return [row[:n] for row, n in zip(output.batch.response_ids.tolist(), lengths, strict=True)]


def arrow_table(columns: dict[str, list[Any]], types: dict[str, str]) -> Any:
    """Columns as a `pyarrow.Table` of the given types; ``list<…>`` for lists."""
    import pyarrow as pa

    def typed(name: str) -> Any:
        inner = name.removeprefix("list<").removesuffix(">")
        found = pa.bool_() if inner == "bool" else getattr(pa, inner)()
        return pa.list_(found) if name.startswith("list<") else found

    schema = pa.schema([(column, typed(name)) for column, name in types.items()])
    return pa.table({column: columns[column] for column in types}, schema=schema)

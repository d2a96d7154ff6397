"""Rollouts as rows of Parquet files, and the callback that keeps those of training. Text from a model is untrusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from grail_lightning.answers import Alignment
from grail_lightning.batch import SampledBatch
from grail_lightning.callbacks.hooks import fast_dev_run, module_of, output_of
from grail_lightning.environments.episode import episode_columns, episode_json, transcript
from grail_lightning.picture import as_text
from grail_lightning.runtime.files import whole_file
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.step.figures import StepOutput
from grail_lightning.tasks.base import Prompt

# The types are names of pyarrow, which is imported where it is used, since help resolves the types of this file. The
# schema is fixed, so that files of different batches can be read as one table.
ROLLOUT_COLUMNS = {
    **dict.fromkeys(("dataset", "prompt", "reference", "response"), "string"),
    "reward": "float64",
    "correct": "bool",
    "status": "string",
    "advantage": "float32",
    "finished": "bool",
    "num_tokens": "int32",
    "group": "int64",
    "token_ids": "list<int32>",
}
# With environments alone, so that other files stay as they are.
TURN_COLUMNS = {
    **dict.fromkeys(("turns", "prompt_ids"), "list<int32>"),
    **dict.fromkeys(("num_turns", "num_calls", "num_invalid_calls"), "int32"),
    **dict.fromkeys(("end", "transcript", "episode"), "string"),
}
TRAINING_COLUMNS = {"step": "int64", "rank": "int32"} | ROLLOUT_COLUMNS | {"messages": "string", "columns": "string"}


class KeepRollouts(Callback):
    """Keeps all training rollouts: one Parquet file for each batch and rank, ``step_00000012_rank_00000.parquet``.

    ``docs/files.md`` lists the columns. `step` counts optimiser steps, as in TensorBoard. A resumed run adds files to
    the folder. ``pandas.read_parquet(folder)`` reads it, and ``predict --data.kept.newest=200`` its newest rollouts.

    Args:
        folder: The folder to write to; default ``rollouts`` in the folder of the run.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._path = Path()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine the folder. This is a collective, so all ranks take part.

        A resumed run takes the batches after its checkpoint again, so their files are removed; of a folder that is
        given, which others may share, those of the batch alone that `max_steps` cut.
        """
        self._path = Path(self.folder) if self.folder else RunFolder(trainer).path / "rollouts"
        if trainer.ckpt_path is not None and trainer.is_global_zero and not fast_dev_run(trainer):
            most = module_of(pl_module).execution.steps_per_batch if self.folder else math.inf
            for file in self._path.glob("step_*_rank_*.parquet"):
                if 0 < int(file.name.split("_")[1]) - trainer.global_step < most:
                    file.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Write the batch."""
        if fast_dev_run(trainer):
            return
        output, step, rank = output_of(outputs), trainer.global_step, trainer.global_rank
        prompts = output.batch.prompts
        columns = rollout_columns(output)
        columns |= {"step": [step] * len(prompts), "rank": [rank] * len(prompts)}
        columns |= {name: [_json(getattr(prompt, name)) for prompt in prompts] for name in ("messages", "columns")}
        table = arrow_table(columns, TRAINING_COLUMNS | {k: v for k, v in TURN_COLUMNS.items() if k in columns})
        write_tables(self._path / f"step_{step:08d}_rank_{rank:05d}.parquet", [table], table.schema)


def _json(value: object) -> str:
    """JSON; what it has no form for, such as a date, is text."""
    return encodable(json.dumps(value, ensure_ascii=False, default=str))


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: plain text as it is, a conversation as ``role: content`` lines."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    return "\n".join(f"{message.get('role', '')}: {as_text(message.get('content', ''))}" for message in prompt.messages)


def response_text(batch: SampledBatch, row: int) -> str:
    """A response as people read it: in an environment with all turns and what it told, else as it is."""
    if batch.episodes is None or not batch.in_environment[row]:
        return batch.texts[row]
    return transcript(batch.episodes[row])


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can hold but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def rollout_columns(output: StepOutput) -> dict[str, list[Any]]:
    """The `ROLLOUT_COLUMNS` of a step's rollouts, ``B`` values each, and in an environment the `TURN_COLUMNS`."""
    batch = output.batch
    return {
        "dataset": [encodable(prompt.dataset) for prompt in batch.prompts],
        "prompt": [encodable(prompt_text(prompt)) for prompt in batch.prompts],
        "reference": [encodable(prompt.reference) for prompt in batch.prompts],
        "response": [encodable(text) for text in batch.texts],
        "reward": batch.rewards_in_files,
        "correct": batch.correct.tolist(),
        "status": [verdict.status for verdict in batch.verdicts],
        "advantage": [None] * len(batch) if output.advantages is None else output.advantages.tolist(),
        "finished": batch.finished.tolist(),
        "num_tokens": batch.response_lengths.tolist(),
        "group": batch.group.tolist(),
        "token_ids": _kept(batch.response_ids, batch.valid_mask),
        **_turn_columns(batch),
    }


def _turn_columns(batch: SampledBatch) -> dict[str, list[Any]]:
    if batch.turn is None:
        return {}
    width = batch.prompt_width
    rows = [episode_columns(episode) | {"episode": episode_json(episode)} for episode in batch.episodes or []]
    rows = rows or [{}] * len(batch)
    return {name: [row.get(name) for row in rows] for name in TURN_COLUMNS} | {
        "turns": _kept(batch.turn.masked_fill(~batch.response_mask, -1), batch.valid_mask),
        "prompt_ids": _kept(batch.input_ids[:, :width], batch.attention_mask[:, :width]),
    }


def _kept(table: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[own].tolist() for row, own in zip(table.cpu(), mask.cpu(), strict=True)]


def sampled_values(values: Tensor, sampled: Tensor) -> list[float | None]:
    """Values ``[n]`` as a list, with None where `sampled` ``[n]`` is False."""
    return [value if own else None for value, own in zip(values.tolist(), sampled.tolist(), strict=True)]


def arrow_table(columns: dict[str, list[Any]], types: dict[str, str]) -> Any:
    """Columns as a `pyarrow.Table` of the given types; ``list<…>`` for lists."""
    import pyarrow as pa

    def typed(kind: str) -> Any:
        scalar = pa.type_for_alias(kind.removeprefix("list<").removesuffix(">"))
        return pa.list_(scalar) if kind.startswith("list<") else scalar

    schema = pa.schema([(column, typed(kind)) for column, kind in types.items()])
    return pa.table({column: columns[column] for column in types}, schema=schema)


def write_tables(file: Path, tables: Iterable[Any], schema: Any) -> None:
    """Write `pyarrow.Table`s of a schema to a file, which appears when it is complete."""
    import pyarrow.parquet as pq

    with whole_file(file) as unfinished, pq.ParquetWriter(unfinished, schema) as writer:
        for table in tables:
            writer.write_table(table)


def answer_place(output: StepOutput, row: int, aligned: Alignment) -> tuple[tuple[int, int] | None, list[int]]:
    """The characters of a row's answer, None without one, and its tokens: of the answer that the credit method used."""
    masks = (output.weights and output.weights.answer) or output.batch.answer
    tokens = [] if masks is None else masks.whole[row].nonzero().flatten().tolist()
    # The answer whose tokens the mask marks. The choice among several was made when the mask was made.
    answers = output.batch.prompts[row].task.answer_spans(aligned.text) if tokens else []
    marked = [(a.start, a.stop) for a in answers if aligned.overlapping(a.start, a.stop) == tokens]
    return (marked[-1] if marked else None), tokens

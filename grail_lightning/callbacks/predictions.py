"""The callback that writes the token credit of given or sampled texts as Parquet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grail_lightning.callbacks.hooks import module_of, output_of
from grail_lightning.callbacks.judged import tell_policy
from grail_lightning.callbacks.records import ROLLOUT_COLUMNS, arrow_table, encodable, rollout_columns
from grail_lightning.grading.locate import align_rows
from grail_lightning.runtime.run_folder import RunFolder, unused
from grail_lightning.step.outputs import StepOutput

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule

_PREDICTION_COLUMNS = {
    **ROLLOUT_COLUMNS,
    "token_ids": "list<int32>",
    "tokens": "list<string>",
    "token_starts": "list<int32>",
    "token_stops": "list<int32>",
    "weights": "list<float32>",
    "scores": "list<float32>",
    "fallback": "bool",
    "box_start": "int32",
    "box_stop": "int32",
    "box_first_token": "int32",
    "box_last_token": "int32",
}


class PredictionWriter(Callback):
    """Writes the results of `predict`, one row for each rollout.

    It is not a `BasePredictionWriter`, because Lightning would then require batch indices, which loaders of prompts do
    not have.

    Columns: those of `KeepRollouts` without step and rank, and for each rollout

    - ``token_ids``, ``tokens`` (each decoded by itself), ``token_starts`` and ``token_stops`` (the characters of
      `response` that a token carries; an emoji may be shared by several), ``weights``, ``scores`` (null if the credit
      has none): lists as long as the response;
    - ``fallback``: whether the credit method should have weighted the rollout but could not;
    - ``box_start``, ``box_stop``: characters of the located answer, with what marks it; ``box_first_token`` and
      ``box_last_token``: its tokens, both included; null without an answer.

    Args:
        file: The file to write; default ``predictions.parquet`` in the folder of the run. It holds the rows of the
            ranks one after the other. An earlier file is kept under a number, ``predictions.1.parquet``.
    """

    def __init__(self, file: str | None = None) -> None:
        self.file = file
        self._path = Path()
        self._writer: Any = None
        self._rows = 0
        self._loaded: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the checkpoint of an earlier stage."""
        self._loaded = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember the step of the loaded policy."""
        self._loaded = checkpoint["global_step"]

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open this rank's partial file."""
        import pyarrow.parquet as pq

        tell_policy(trainer, pl_module, self._loaded)
        self._path = Path(self.file) if self.file else RunFolder(trainer).path / "predictions.parquet"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        empty = arrow_table({name: [] for name in _PREDICTION_COLUMNS}, _PREDICTION_COLUMNS)
        self._writer = pq.ParquetWriter(self._part(trainer.global_rank), empty.schema)
        self._rows = 0

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the rollouts of a batch."""
        output = output_of(outputs)
        if len(output.batch):
            columns = _prediction_columns(output, module_of(pl_module))
            self._writer.write_table(arrow_table(columns, _PREDICTION_COLUMNS))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the partial files of all ranks. The file appears when it is complete."""
        self._close()
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero:
            if self._path.exists():
                earlier = self._path.rename(unused(self._path))
                rank_zero_info(f"The predictions that were in {self._path} are now in {earlier}.")
            self._rows = _join([self._part(rank) for rank in range(trainer.world_size)], self._path)
        rank_zero_info(f"Wrote {self._rows} predictions to {self._path}.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the partial file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _part(self, rank: int) -> Path:
        return self._path.with_name(f".{self._path.name}.rank{rank}")


def _prediction_columns(output: StepOutput, module: GrailModule) -> dict[str, list[Any]]:
    """The `_PREDICTION_COLUMNS` of a batch, ``B`` values each."""
    batch, weights = output.batch, output.weights
    lengths = batch.response_lengths.tolist()
    ids = [row[:n] for row, n in zip(batch.response_ids.tolist(), lengths, strict=True)]
    columns = rollout_columns(output)
    columns["token_ids"] = ids
    columns["tokens"] = [[encodable(module.tokenizer.decode([token])) for token in row] for row in ids]
    columns["weights"] = _rows(None if weights is None else weights.values, lengths)
    columns["scores"] = _rows(None if weights is None else weights.scores, lengths)
    columns["fallback"] = [None] * len(batch) if weights is None else weights.fallback.tolist()
    return columns | _spans(output, module)


def _rows(values: Tensor | None, lengths: list[int]) -> list[list[float] | None]:
    """``[B, T]`` as lists without padding."""
    if values is None:
        return [None] * len(lengths)
    return [row[:n] for row, n in zip(values.detach().float().tolist(), lengths, strict=True)]


def _spans(output: StepOutput, module: GrailModule) -> dict[str, list[Any]]:
    """The character ranges of each token and of the answer, and the token range of the answer."""
    names = ("token_starts", "token_stops", "box_start", "box_stop", "box_first_token", "box_last_token")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    masks = (output.weights and output.weights.answer) or output.batch.answer
    for row, aligned in enumerate(align_rows(output.batch, module.tokenizer)):
        tokens = [] if masks is None else torch.nonzero(masks.whole[row]).flatten().tolist()
        # The answer whose tokens the mask marks. The choice among several was made when the mask was made.
        answers = output.batch.prompts[row].task.answer_spans(aligned.text) if tokens else []
        marked = [a for a in answers if aligned.overlapping(a.start, a.stop) == tokens]
        box = (marked[-1].start, marked[-1].stop) if marked else (None, None)
        ends = (tokens[0], tokens[-1]) if tokens else (None, None)
        found = (list(aligned.starts), list(aligned.stops), *box, *ends)
        for name, value in zip(names, found, strict=True):
            columns[name].append(value)
    return columns


def _join(parts: list[Path], file: Path) -> int:
    """Join several files into one, remove them, and return the number of rows."""
    import pyarrow.parquet as pq

    if len(parts) == 1:
        os.replace(parts[0], file)
        return int(pq.read_metadata(file).num_rows)
    unfinished = file.with_name(f".{file.name}.unfinished")
    num_rows = 0
    with pq.ParquetWriter(unfinished, pq.read_schema(parts[0])) as writer:
        for part in parts:
            with pq.ParquetFile(part) as source:
                for index in range(source.num_row_groups):
                    table = source.read_row_group(index)
                    writer.write_table(table)
                    num_rows += table.num_rows
    os.replace(unfinished, file)
    for part in parts:
        part.unlink()
    return num_rows

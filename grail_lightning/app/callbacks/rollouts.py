"""The callback that keeps the rollouts of training, and the credit and the answer of a rollout's tokens."""

from __future__ import annotations

import math
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from grail_lightning.answers.spans import Alignment
from grail_lightning.app.callbacks.hooks import fast_dev_run, module_of, output_of
from grail_lightning.core.records.columns import TRAINING, write_parquet
from grail_lightning.core.rollout.rows import rows_of
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.core.step.figures import StepOutput


class KeepRollouts(Callback):
    """Keeps all training rollouts: one Parquet file for each batch and rank, ``step_00000012_rank_00000.parquet``.

    The page "Files and columns" lists the columns. `step` counts optimiser steps, as in TensorBoard. A resumed run
    adds files to the folder. ``pandas.read_parquet(folder)`` reads it, and ``predict --data.kept.newest=200`` its
    newest rollouts.

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
        number = len(output.batch)
        rows = rows_of(output.batch, TRAINING, output.advantages)
        rows |= {"step": [step] * number, "rank": [rank] * number}
        write_parquet(self._path / f"step_{step:08d}_rank_{rank:05d}.parquet", rows, TRAINING)


def sampled_values(values: Tensor, sampled: Tensor) -> list[float | None]:
    """Values ``[n]`` as a list, with None where `sampled` ``[n]`` is False."""
    return [value if is_sampled else None for value, is_sampled in zip(values.tolist(), sampled.tolist(), strict=True)]


def answer_place(output: StepOutput, row: int, aligned: Alignment) -> tuple[tuple[int, int] | None, list[int]]:
    """The characters of a row's answer, None without one, and its tokens: of the answer that the credit method used."""
    masks = (output.weights and output.weights.answer) or output.batch.answer
    tokens = [] if masks is None else masks.whole[row].nonzero().flatten().tolist()
    # The answer whose tokens the mask marks. The choice among several was made when the mask was made.
    answers = output.batch.prompts[row].task.answer_spans(aligned.text) if tokens else []
    marked = [(a.start, a.stop) for a in answers if aligned.overlapping(a.start, a.stop) == tokens]
    return (marked[-1] if marked else None), tokens

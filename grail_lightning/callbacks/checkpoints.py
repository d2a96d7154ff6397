"""A checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.policy.checkpoint_io import HostCheckpointIO
from grail_lightning.run_folder import RunFolder


class LastCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` at the state of the last validation, and of the end of training.

    ``ModelCheckpoint(monitor=…, save_last=True)`` writes its ``last.ckpt`` only when the monitored figure is among the
    best: after a validation that was not, it is an older state. Its `every_n_train_steps` only hits multiples of it,
    which optimiser steps, several a batch, may jump over. This callback writes at batch borders alone.

    Args:
        every_n_batches: Write after every so many training batches, too; 0 is off.
        on_validation: Write after each validation. Off saves time and disk writes with a large policy.
        folder: Where; default ``checkpoints`` in the folder of the run.

    Raises:
        ValueError: If `every_n_batches` is negative.
    """

    def __init__(self, every_n_batches: int = 0, on_validation: bool = True, folder: str | None = None) -> None:
        if every_n_batches < 0:
            raise ValueError(f"`every_n_batches` must be 0 (off) or positive, but got {every_n_batches}.")
        self.every_n_batches, self.on_validation, self.folder = every_n_batches, on_validation, folder
        self._saved_at = 0
        self._file: Path | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Have quantised optimiser state read back, too; a plugin of the user's stays."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = HostCheckpointIO()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find out where to save: a broadcast that every rank takes part in, as in an interruption it may not."""
        folder = Path(self.folder) if self.folder else RunFolder(trainer).path / "checkpoints"
        self._file = folder / "last.ckpt"

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """What a run was resumed from is saved already."""
        self._saved_at = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save every so many batches."""
        if self.every_n_batches and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save with the figures of this validation."""
        if self.on_validation and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._saved_at = 0
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save what came after the last validation."""
        self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Say after an interruption what there is to go on from."""
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "fit":
            there = self._saved_at and self._file is not None and self._file.exists()
            rank_zero_info(
                f"Interrupted at step {trainer.global_step}; {self._file} is of step {self._saved_at}. Go on with the "
                f"same command and `--ckpt_path={self._file if self.folder else 'last'}`."
                if there
                else f"Interrupted at step {trainer.global_step}, before its first checkpoint."
            )

    def _save(self, trainer: Any) -> None:
        if trainer.fast_dev_run or trainer.global_step in (0, self._saved_at):
            return
        assert self._file is not None
        trainer.save_checkpoint(self._file, weights_only=False)  # Else Lightning remarks on it each time.
        self._saved_at = trainer.global_step

"""A checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning.callbacks.termination import Termination
from grail_lightning.distributed.checkpoint_io import DurableCheckpointIO, remove_parts, save_whole
from grail_lightning.runtime.run_folder import RunFolder


class LastCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` at the state of the last validation, and of the end of training.

    ``ModelCheckpoint(monitor=…, save_last=True)`` writes its ``last.ckpt`` only when the monitored figure is among the
    best: after a validation that was not, it is an older state. Its `every_n_train_steps` only hits multiples of it,
    which optimiser steps, several a batch, may jump over. This callback writes at batch borders alone. Where
    `max_steps` cuts a batch, ``last.ckpt`` is of the step at which that batch began: a resumed run equals one that did
    not stop.

    A run that gets a SIGTERM saves at the next border and ends.

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
        self._saved_at: int | None = None
        self._file: Path | None = None
        self._termination = Termination()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Have checkpoints written whole or not at all; a plugin of the user's stays."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableCheckpointIO()

    # --- when -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Find out where to save: a broadcast that every rank takes part in, as in an interruption it may not.

        What runs that were killed in the middle of saving have left there goes.
        """
        folder = Path(self.folder) if self.folder else RunFolder(trainer).path / "checkpoints"
        self._file, self._saved_at = folder / "last.ckpt", None
        if trainer.is_global_zero:
            remove_parts(folder)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """What a run was resumed from is saved already."""
        self._termination.watch(trainer, noting=True)
        resumed = trainer.ckpt_path and self._file and Path(trainer.ckpt_path).resolve() == self._file.resolve()
        self._saved_at = trainer.global_step if resumed else None
        if _may_be_cut(trainer, pl_module):
            self._save(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save every so many batches, before one that `max_steps` may cut, and after a SIGTERM."""
        due = self.every_n_batches and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0
        if due or _may_be_cut(trainer, pl_module):
            self._save(trainer, pl_module)
        self._end_if_asked(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A validation before the first step has nothing to save, nor has one by itself."""
        if trainer.global_step == 0 or trainer.state.fn != "fit":
            self._termination.watch(trainer, noting=False)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save with the figures of this validation."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.global_step == 0:
            return
        if self.on_validation:
            self._save(trainer, pl_module, again=True)
        self._end_if_asked(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A test, and a prediction, end at once if they have to."""
        self._termination.watch(trainer, noting=False)

    on_predict_start = on_test_start

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what came after the last validation, unless `max_steps` has cut a batch."""
        self._save(trainer, pl_module)
        if pl_module.steps_left and not trainer.fast_dev_run:
            rank_zero_info(
                f"`max_steps` {trainer.max_steps} fell inside a batch of rollouts: {self._file} is of step "
                f"{self._saved_at}, where that batch began, so that a resumed run equals one that did not stop."
            )

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Say after an interruption what there is to go on from."""
        if not isinstance(exception, KeyboardInterrupt | SIGTERMException):
            return
        what = "Ended by SIGTERM" if isinstance(exception, SIGTERMException) else "Interrupted"
        if trainer.state.fn != "fit":
            rank_zero_info(f"{what}.")
            return
        there = self._saved_at is not None and self._file is not None and self._file.exists()
        rank_zero_info(
            f"{what} at step {trainer.global_step}; {self._file} is of step {self._saved_at}. Go on with the "
            f"same command and `--ckpt_path={self._file if self.folder else 'last'}`."
            if there
            else f"{what} at step {trainer.global_step}, before its first checkpoint."
        )

    # --- what -------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Mark what other callbacks save inside a batch."""
        checkpoint["steps_left"] = pl_module.steps_left

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Tell of a resume that cannot be exact."""
        if checkpoint.get("steps_left") and trainer.state.fn == "fit":
            rank_zero_warn(
                f"This checkpoint was saved inside a batch of rollouts, at step {checkpoint['global_step']}: the steps "
                f"that were left of it ({checkpoint['steps_left']}) are not made up for. A run that goes on from "
                "last.ckpt, which is of the step before that batch, equals one that did not stop."
            )

    def _save(self, trainer: Any, pl_module: Any, *, again: bool = False) -> None:
        """Save at the border of a batch, unless that is done; `again` with other figures."""
        if trainer.fast_dev_run or pl_module.steps_left or (trainer.global_step == self._saved_at and not again):
            return
        assert self._file is not None
        save_whole(trainer, self._file)
        self._saved_at = trainer.global_step

    def _end_if_asked(self, trainer: Any, pl_module: Any) -> None:
        if self._termination.noted(pl_module.device):
            self._save(trainer, pl_module)
            if trainer.global_step != trainer.max_steps:  # A run at its end comes to it, with its export.
                self._termination.end()


def _may_be_cut(trainer: Any, pl_module: Any) -> bool:
    """Whether `max_steps` may fall inside the next batch."""
    most: int = pl_module.execution.steps_per_batch
    return 0 < int(trainer.max_steps - trainer.global_step) < most

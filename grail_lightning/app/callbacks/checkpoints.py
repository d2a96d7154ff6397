"""The checkpoint from which a run is resumed, also after a SIGTERM, and the default checkpoints of a Python run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning.app.callbacks.export import check_steps_left
from grail_lightning.app.callbacks.hooks import callbacks_of, fast_dev_run, module_of
from grail_lightning.core.distributed.checkpoint_io import DurableCheckpointIO, remove_parts, save_whole
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.runtime.run_folder import RunFolder, unused

_LIGHTNINGS = ModelCheckpoint().state_key
_NOTED = b"\nSIGTERM: the run saves and ends when this batch of rollouts, or this validation, is done.\n"


class LastCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt`` at the state of the last validation, and of the end of training.

    It saves only between two batches, whatever the monitored figure. If `max_steps` falls inside a batch, the file
    holds the step at which that batch began, so that a resumed run equals an uninterrupted one. A run that receives a
    SIGTERM saves after the current batch and ends.

    Args:
        every_n_batches: The number of training batches between two further saves; 0 switches them off.
        on_validation: Whether to save after each validation. False saves time and disk writes with a large policy.
        folder: The folder of the file; default ``checkpoints`` in the folder of the run.
    """

    def __init__(self, every_n_batches: int = 0, on_validation: bool = True, folder: str | None = None) -> None:
        check_option("every_n_batches", every_n_batches, "[0, inf)")
        self.every_n_batches, self.on_validation, self.folder = every_n_batches, on_validation, folder
        self._saved_at: int | None = None
        self._best: list[Any] = []  # What `_best_of` was at the last save.
        self._due = False
        self.file = Path()
        self._termination = _Termination()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make Lightning write checkpoints completely or not at all. A plugin that the user has set is kept."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        if stage == "fit" and any(getattr(c, "_train_time_interval", None) for c in trainer.checkpoint_callbacks):
            raise ValueError(
                "`train_time_interval` of ModelCheckpoint must be left out: Lightning ignores it where optimisation is "
                "manual. Use `last_checkpoint.every_n_batches`, or `every_n_train_steps`."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine where to save, remove partial files of killed runs, and move checkpoints of earlier runs aside."""
        # A broadcast over all ranks, which would not be safe during an interruption.
        of_run = RunFolder(trainer).path / "checkpoints"
        self.file, self._saved_at = Path(self.folder or of_run) / "last.ckpt", None
        if trainer.is_global_zero:
            remove_parts(self.file.parent)
        if not trainer.is_global_zero or trainer.ckpt_path is not None or fast_dev_run(trainer):
            return
        folders = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        for file in (self.file, *(Path(folder) / "best.ckpt" for folder in folders if folder)):
            if file.parent != of_run and file.exists():  # Several runs may share a folder that the user has given.
                aside = file.rename(unused(file))
                rank_zero_info(f"{file} is of an earlier run, and now in {aside}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch for SIGTERM. The state from which a run was resumed is not saved a second time."""
        self._termination.watch(trainer, noting=True)
        resumed = trainer.ckpt_path and Path(trainer.ckpt_path).resolve() == self.file.resolve()
        self._saved_at = trainer.global_step if resumed else None
        if _may_be_cut(trainer, pl_module):
            self._save(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save every `every_n_batches`, before a batch that `max_steps` may interrupt, and after a SIGTERM.

        The state of a run whose schedule has failed is saved, too.
        """
        due = self.every_n_batches and (trainer.fit_loop.total_batch_idx + 1) % self.every_n_batches == 0
        failed = module_of(pl_module).schedule_failed is not None  # The run ends before a validation.
        self._due = bool(due) or _may_be_cut(trainer, pl_module) or failed
        # Otherwise it waits: a run resumed from between the two would lack it.
        if failed or not _validation_follows(trainer):
            self._save_if_due(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation before the first step, or outside of a fit, has nothing to save: a SIGTERM ends it at once."""
        if trainer.global_step == 0 or trainer.state.fn != "fit":
            self._termination.watch(trainer, noting=False)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save with the figures of this validation."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.global_step == 0:
            return
        if self.on_validation:
            self._save(trainer, pl_module, again=True)
        self._save_if_due(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save again if Lightning has kept a better checkpoint since: a resumed run would write over it."""
        if trainer.global_step == self._saved_at and _best_of(trainer) != self._best:
            self._save(trainer, pl_module, again=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the state at the end of training, unless `max_steps` has interrupted a batch."""
        self._save(trainer, pl_module)
        if module_of(pl_module).steps_cut and not fast_dev_run(trainer):
            rank_zero_info(
                f"`max_steps` {trainer.max_steps} fell inside a batch of rollouts: {self.file} is of step "
                f"{self._saved_at}, where that batch began, so that a resumed run equals an uninterrupted one."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report from which checkpoint a run can be resumed that was interrupted, or ended by an error."""
        ends = {SIGTERMException: "Ended by SIGTERM", KeyboardInterrupt: "Interrupted"}
        what = next((outcome for kind, outcome in ends.items() if isinstance(exception, kind)), "Failed")
        fits = trainer.state.fn == "fit"
        if fits and self._saved_at is not None and self.file.exists():
            rank_zero_info(
                f"{what} at step {trainer.global_step}; {self.file} is of step {self._saved_at}. Resume with the "
                f"same command and `--ckpt_path={self.file if self.folder else 'last'}`."
            )
        elif what != "Failed":
            where = f" at step {trainer.global_step}, before its first checkpoint" if fits else ""
            rank_zero_info(f"{what}{where}.")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Mark checkpoints that are saved inside a batch, and leave an epoch open whose batches are not all trained on.

        The mark is `steps_left`: the most optimiser steps of that batch that are missing. A resumed run does not take
        them, but begins with the next batch.

        Lightning closes the epoch in which a run stops before the last saves. A resumed run would begin the next one.
        """
        if trainer.global_step == 0:
            # Under FSDP2 torch gives an optimiser a state to save by a step without gradients, which must not count.
            by_parameter = [optimizer.state for optimizer in trainer.optimizers]
            by_parameter += [saved["state"] for saved in checkpoint["optimizer_states"] if saved]
            for state in chain.from_iterable(states.values() for states in by_parameter):
                if "step" in state:
                    state["step"] = state["step"] * 0
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        module, begun = module_of(pl_module), batches.ready > batches.processed  # An exception has ended a batch, say.
        checkpoint["steps_left"] = module.execution.steps_per_batch if begun else module.steps_cut
        if 0 < batches.ready < trainer.num_training_batches:
            for progress in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                progress["processed"] = progress["completed"] = max(progress["started"] - 1, 0)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check that steps are left, and warn if the resumed run cannot equal an uninterrupted one."""
        if trainer.state.fn != "fit":
            return
        if trainer.ckpt_path is not None:
            check_steps_left(trainer, trainer.ckpt_path, checkpoint)
        if checkpoint.get("steps_left"):
            rank_zero_warn(
                f"This checkpoint was saved inside a batch of rollouts, at step {checkpoint['global_step']}: the rest "
                f"of it, at most {checkpoint['steps_left']} steps, is lost. Resume from last.ckpt to equal an "
                "uninterrupted run."
            )

    def _save_if_due(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what is due; save and end after a SIGTERM. A collective."""
        if self._due:
            self._save(trainer, pl_module)
        self._due = False
        if self._termination.noted(pl_module.device):
            self._save(trainer, pl_module)
            if trainer.global_step != trainer.max_steps:  # A run at its last step finishes normally and exports.
                self._termination.end()

    def _save(self, trainer: Trainer, pl_module: LightningModule, *, again: bool = False) -> None:
        """Save if the run is between two batches and this step is not saved yet; `again` saves it in any case."""
        saved = trainer.global_step == self._saved_at and not again
        if fast_dev_run(trainer) or module_of(pl_module).steps_cut or saved:
            return
        save_whole(trainer, self.file)
        if not self._saved_at and trainer.is_global_zero:  # At step 0 the optimiser has no state yet.
            _warn_of_full_disk(self.file)
        self._saved_at, self._best = trainer.global_step, _best_of(trainer)


class DefaultCheckpoints(Callback):
    """Puts ``best.ckpt`` (by ``val/accuracy``) and ``last.ckpt`` in the place of Lightning's own checkpoints.

    A Trainer with `enable_checkpointing=False` or `barebones` raises for any checkpoint in its list of callbacks. So
    they join when a run begins, if it saves checkpoints.
    """

    def __init__(self) -> None:
        self.best = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", enable_version_counter=False)
        self.last = LastCheckpoint()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's callback, which would keep a file of its own after each epoch."""
        callbacks = callbacks_of(trainer)
        if not trainer.checkpoint_callbacks or self.last in callbacks:
            return
        for theirs in [*trainer.checkpoint_callbacks]:
            if type(theirs) is ModelCheckpoint and theirs.state_key == _LIGHTNINGS and theirs.dirpath is None:
                callbacks.remove(theirs)
        if trainer.enable_validation:
            # Without a logger Lightning would take the working folder.
            self.best.dirpath = self.best.dirpath or str(RunFolder(trainer).path / "checkpoints")
            callbacks.append(self.best)
        callbacks.append(self.last)  # Behind the best one, whose state it saves. Lightning calls both `setup`s next.


class _Termination:
    """A handler of SIGTERM: in training it only records the signal, elsewhere it ends the process at once.

    In training all ranks must end at the same point, so the signal is acted upon later. The handler replaces
    Lightning's, which starts a collective at whatever point the signal arrives, and after which the exit code is 0.
    """

    def __init__(self) -> None:
        self._noting = self._noted = False
        self._first, self._code = True, 143

    def watch(self, trainer: Trainer, *, noting: bool) -> None:
        """Install the handler. It records the signal if `noting`, and otherwise ends the process at once."""
        self._noting = noting
        self._noted = self._noted or trainer.received_sigterm  # By Lightning's handler, which this one replaces.
        # Lightning kills the first process of a node in its cleanup if another one that it has started fails earlier.
        self._first, self._code = trainer.is_global_zero, 0 if trainer.local_rank else 143
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if not self._noting:
            self.end()
        if self._first and not self._noted:
            with contextlib.suppress(OSError):
                os.write(2, _NOTED)  # A logger might be in the middle of a line.
        self._noted = True

    def noted(self, device: torch.device) -> bool:
        """Whether any rank has received the signal. A collective."""
        return bool(all_reduce(torch.tensor(int(self._noted), device=device), "max"))

    def end(self) -> NoReturn:
        """Raise the exception with which Lightning cleans up and leaves the trainer."""
        raise SIGTERMException(self._code)


def _best_of(trainer: Trainer) -> list[Any]:
    """The best checkpoints of Lightning's callbacks, and their scores."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [(c.best_model_path, c.best_model_score) for c in callbacks]


def _warn_of_full_disk(file: Path) -> None:
    """Warn unless two more checkpoints fit: one replaces the last one, and the best one and the export follow."""
    parts = [part for part in file.rglob("*") if part.is_file()] if file.is_dir() else [file]  # Shards are a folder.
    size, free = sum(part.stat().st_size for part in parts), shutil.disk_usage(file.parent).free
    if free < 2 * size:
        rank_zero_warn(
            f"A checkpoint takes {size / 2**20:,.1f} MiB, and {file.parent} has {free / 2**20:,.1f} MiB free, less "
            "than two more. Free some space, keep less (`checkpoint.save_top_k: 0`, `checkpoint.save_weights_only: "
            "true`), or choose a folder on another disk."
        )


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning will validate right after this batch. Not known if it validates by the clock."""
    fetcher, by_clock = trainer.fit_loop._data_fetcher, getattr(trainer, "_val_check_time_interval", None) is not None
    # A data module of the user's may have loaders for validation, but nothing in them.
    empty = trainer.val_dataloaders is not None and trainer.fit_loop.epoch_loop.val_loop.skip
    if fetcher is None or by_clock or empty or not trainer.enable_validation:
        return False
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def _may_be_cut(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether `max_steps` may fall inside the next batch."""
    return 0 < trainer.max_steps - trainer.global_step < module_of(pl_module).execution.steps_per_batch

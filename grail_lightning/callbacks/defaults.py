"""The callbacks of a run that is started from Python."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar

from grail_lightning.batch import Sampling
from grail_lightning.callbacks.checkpoints import LastCheckpoint
from grail_lightning.callbacks.dashboard import Dashboard
from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.export import ExportPolicy
from grail_lightning.callbacks.hooks import callbacks_of
from grail_lightning.callbacks.pictures import CreditPictures
from grail_lightning.callbacks.predictions import PredictionWriter
from grail_lightning.callbacks.preflight import Preflight
from grail_lightning.callbacks.progress import ProgressBar, Throughput
from grail_lightning.callbacks.rollouts import KeepRollouts, RolloutTable
from grail_lightning.runtime.run_folder import RunFolder

_LIGHTNINGS = ModelCheckpoint().state_key


class _CheckpointsAndBar(Callback):
    """Puts ``best.ckpt`` (by ``val/accuracy``), ``last.ckpt`` and our progress bar in the place of Lightning's own.

    A Trainer has its own unless a flag switches them off (`enable_checkpointing`, `enable_progress_bar`, `barebones`),
    and then raises for any in its list of callbacks. So they join when a run begins, if it has some.

    Args:
        progress_bar: Whether to replace the progress bar.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        self.best = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", enable_version_counter=False)
        self.last, self.bar = LastCheckpoint(), ProgressBar() if progress_bar else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace callbacks that stand behind this one. Lightning calls their `setup` after it."""
        callbacks = callbacks_of(trainer)
        for theirs in callbacks[callbacks.index(self) + 1 :]:
            if self.bar is not None and type(theirs) in (RichProgressBar, TQDMProgressBar):
                callbacks[callbacks.index(theirs)] = self.bar
            elif type(theirs) is ModelCheckpoint and theirs.state_key == _LIGHTNINGS and theirs.dirpath is None:
                callbacks.remove(theirs)  # It would keep a file of its own after each epoch.
                callbacks.append(self.last)
        if trainer.checkpoint_callbacks and self.last not in callbacks:
            callbacks.append(self.last)
        if self.last in callbacks and self.best not in callbacks and trainer.enable_validation:
            folder = RunFolder(trainer).path / "checkpoints"  # Without a logger Lightning takes the working folder.
            self.best.dirpath = self.best.dirpath or str(folder)
            callbacks.insert(callbacks.index(self.last), self.best)


def default_callbacks(
    num_samples: int = 1,
    sampling: Sampling | None = None,
    pass_at: tuple[int, ...] = (1,),
    keep_rollouts: bool = False,
    progress_bar: bool = True,
) -> list[Callback]:
    """The callbacks of every command-line run: ``Trainer(callbacks=default_callbacks(), …)`` with any other options.

    Dashboard, evaluation, rollout table, pictures of the credit, throughput, preflight warnings, export, predictions,
    the checkpoints ``best.ckpt`` (by ``val/accuracy``) and ``last.ckpt``, and the progress bar.
    Remove or replace entries of the list as you like.

    Args:
        num_samples: The number of responses to each held-out problem.
        sampling: The sampling options of these responses; default those of training.
        pass_at: The k of each pass@k; at most `num_samples`.
        keep_rollouts: Whether to keep all training rollouts as Parquet files.
        progress_bar: Whether our progress bar replaces Lightning's; False keeps that one, or yours.
    """
    return [
        _CheckpointsAndBar(progress_bar),
        Dashboard(),
        Evaluation(num_samples=num_samples, sampling=sampling, pass_at=pass_at),
        RolloutTable(),
        *([KeepRollouts()] if keep_rollouts else []),
        Throughput(),
        CreditPictures(),  # Behind `Throughput`, whose seconds are those of the batch alone.
        Preflight(),
        ExportPolicy(),
        PredictionWriter(),
    ]

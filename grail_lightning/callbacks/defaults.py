"""The callbacks of a run that is started from Python."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from grail_lightning.batch import Sampling
from grail_lightning.callbacks.checkpoints import LastCheckpoint
from grail_lightning.callbacks.dashboard import Dashboard
from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.export import ExportPolicy
from grail_lightning.callbacks.pictures import CreditPictures
from grail_lightning.callbacks.predictions import PredictionWriter
from grail_lightning.callbacks.preflight import Preflight
from grail_lightning.callbacks.progress import ProgressBar
from grail_lightning.callbacks.rollouts import KeepRollouts, RolloutTable
from grail_lightning.callbacks.throughput import Throughput
from grail_lightning.callbacks.watchdog import Watchdog


def default_callbacks(
    num_samples: int = 1,
    sampling: Sampling | None = None,
    pass_at: tuple[int, ...] = (1,),
    keep_rollouts: bool = False,
    progress_bar: bool = True,
) -> list[Callback]:
    """The callbacks of every command-line run: ``Trainer(callbacks=default_callbacks(), num_sanity_val_steps=0, …)``.

    Dashboard, evaluation, rollout table, pictures of the credit, throughput, preflight warnings, export, predictions,
    the checkpoints ``best.ckpt`` (by ``val/accuracy``) and ``last.ckpt``, and the progress bar. Remove or replace
    entries of the list as you like.

    Args:
        num_samples: The number of responses to each held-out problem.
        sampling: The sampling options of these responses; default those of training.
        pass_at: The k of each pass@k; at most `num_samples`.
        keep_rollouts: Whether to keep all training rollouts as Parquet files.
        progress_bar: Whether to add the progress bar; set it to False with ``Trainer(enable_progress_bar=False)``.
    """
    best = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best", enable_version_counter=False)
    return [
        Dashboard(),
        Evaluation(num_samples=num_samples, sampling=sampling, pass_at=pass_at),
        RolloutTable(),
        *([KeepRollouts()] if keep_rollouts else []),
        Throughput(),
        CreditPictures(),  # Behind `Throughput`, whose seconds are those of the batch alone.
        Preflight(),
        ExportPolicy(),
        PredictionWriter(),
        *([ProgressBar()] if progress_bar else []),
        best,
        LastCheckpoint(),
        Watchdog(),
    ]

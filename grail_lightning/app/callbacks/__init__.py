"""Lightning callbacks: evaluation, views and files of rollouts, export, throughput, warnings, checkpoints."""

from lightning.pytorch import Callback

from grail_lightning.app.callbacks.checkpoints import DefaultCheckpoints, LastCheckpoint
from grail_lightning.app.callbacks.credit_plots import CreditPictures
from grail_lightning.app.callbacks.evaluation import Evaluation
from grail_lightning.app.callbacks.export import ExportPolicy
from grail_lightning.app.callbacks.predictions import PredictionWriter
from grail_lightning.app.callbacks.preflight import Preflight
from grail_lightning.app.callbacks.responses import ShowResponses
from grail_lightning.app.callbacks.rollouts import KeepRollouts
from grail_lightning.app.callbacks.throughput import Throughput
from grail_lightning.core.rollout.batch import Sampling

__all__ = [
    "CreditPictures",
    "Evaluation",
    "ExportPolicy",
    "KeepRollouts",
    "LastCheckpoint",
    "PredictionWriter",
    "Preflight",
    "ShowResponses",
    "Throughput",
    "default_callbacks",
]


def default_callbacks(
    num_samples: int = 1,
    sampling: Sampling | None = None,
    pass_at: tuple[int, ...] = (1,),
    keep_rollouts: bool = False,
) -> list[Callback]:
    """The callbacks of every command-line run: ``Trainer(callbacks=default_callbacks(), …)`` with any other options.

    Evaluation, the first responses on the terminal, throughput, pictures of the credit, preflight warnings, export,
    predictions, and the checkpoints ``best.ckpt`` (by ``val/accuracy``) and ``last.ckpt``. Remove or replace entries of
    the list as you like.

    Args:
        num_samples: The number of responses to each held-out problem.
        sampling: The sampling options of these responses; default those of training.
        pass_at: The k of each pass@k; at most `num_samples`.
        keep_rollouts: Whether to keep all training rollouts as Parquet files.
    """
    return [
        DefaultCheckpoints(),
        Evaluation(num_samples=num_samples, sampling=sampling, pass_at=pass_at),
        *([KeepRollouts()] if keep_rollouts else []),
        Throughput(),
        ShowResponses(),  # Behind `Throughput`, whose seconds are those of the batch alone.
        CreditPictures(),
        Preflight(),
        ExportPolicy(),
        PredictionWriter(),
    ]

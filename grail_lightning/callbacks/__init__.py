"""Lightning callbacks: evaluation, views and files of rollouts, export, throughput, warnings, checkpoints."""

from grail_lightning.callbacks.checkpoints import LastCheckpoint
from grail_lightning.callbacks.dashboard import Dashboard
from grail_lightning.callbacks.defaults import default_callbacks
from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.export import ExportPolicy
from grail_lightning.callbacks.pictures import CreditPictures
from grail_lightning.callbacks.predictions import PredictionWriter
from grail_lightning.callbacks.preflight import Preflight
from grail_lightning.callbacks.progress import ProgressBar, Throughput
from grail_lightning.callbacks.rollouts import KeepRollouts, RolloutTable

__all__ = [
    "CreditPictures",
    "Dashboard",
    "Evaluation",
    "ExportPolicy",
    "KeepRollouts",
    "LastCheckpoint",
    "PredictionWriter",
    "Preflight",
    "ProgressBar",
    "RolloutTable",
    "Throughput",
    "default_callbacks",
]

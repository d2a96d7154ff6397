"""The data modules, which turn datasets into `Prompt`s, and their loaders."""

from grail_lightning.data.loaders import EvaluationLoader, PromptSet, TrainingLoader, draws_per_epoch, epoch_order
from grail_lightning.data.modules import ArithmeticData, MathData, PromptData
from grail_lightning.data.sources import DatasetSpec

__all__ = [
    "ArithmeticData",
    "DatasetSpec",
    "EvaluationLoader",
    "MathData",
    "PromptData",
    "PromptSet",
    "TrainingLoader",
    "draws_per_epoch",
    "epoch_order",
]

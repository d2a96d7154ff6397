"""The names of the classes that each option of the command line accepts."""

from __future__ import annotations

import importlib
import inspect

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger

from grail_lightning.answers import AnswerForm
from grail_lightning.credit import CreditControl, TokenCredit
from grail_lightning.engines import RolloutEngine
from grail_lightning.tasks.base import Task

BASES: dict[str, tuple[type, tuple[str, ...]]] = {
    "model.credit": (TokenCredit, ("grail_lightning.credit",)),
    "predictions.compare": (TokenCredit, ("grail_lightning.credit",)),
    "model.control": (CreditControl, ("grail_lightning.credit",)),
    "model.engine": (RolloutEngine, ("grail_lightning.engines",)),
    "model.optimizer": (torch.optim.Optimizer, ("torch.optim",)),
    "model.scheduler": (torch.optim.lr_scheduler.LRScheduler, ("torch.optim.lr_scheduler",)),
    "data": (LightningDataModule, ("grail_lightning.data",)),
    "data.task": (Task, ("grail_lightning.tasks",)),
    "data.task.answer": (AnswerForm, ("grail_lightning.answers.find",)),
    "trainer.callbacks": (Callback, ("grail_lightning.callbacks", "lightning.pytorch.callbacks")),
    "trainer.logger": (Logger, ("lightning.pytorch.loggers",)),
}
"""For each option that takes a class: its base class, and the modules that export the subclasses to users."""
# Classes of torch that no list shows: their step takes more than the gradients, or refuses dense ones.
_UNUSABLE = ("LBFGS", "ReduceLROnPlateau", "SparseAdam")


def choices(option: str) -> list[str]:
    """The sorted names of the classes that an option accepts; empty for an option that is not in `BASES`."""
    base, modules = BASES.get(option, (object, ()))
    exported = {k: v for module in modules for k, v in vars(importlib.import_module(module)).items() if k[0] != "_"}
    return sorted(name for name in exported.keys() - {*_UNUSABLE} if _is_choice(exported[name], base))


def _is_choice(value: object, base: type) -> bool:
    return inspect.isclass(value) and value is not base and issubclass(value, base) and not inspect.isabstract(value)

"""The names of the classes that each option of the command line accepts."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger

from grail_lightning.answers import AnswerForm
from grail_lightning.credit import CreditControl, TokenCredit
from grail_lightning.engines import RolloutEngine
from grail_lightning.tasks.base import Task

# For each option that takes a class: its base class and the modules that export the subclasses to users.
_BASES: dict[str, tuple[type, tuple[str, ...]]] = {
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
# Classes of torch that no list shows: their step takes more than the gradients, or refuses dense ones.
_UNUSABLE = ("LBFGS", "ReduceLROnPlateau", "SparseAdam")


def choices(option: str) -> list[str]:
    """The sorted names of the classes that an option accepts; empty for an option that is not in `_BASES`."""
    if option not in _BASES:
        return []
    base, modules = _BASES[option]
    shown = {k: v for module in modules for k, v in vars(importlib.import_module(module)).items()}
    return sorted(name for name, value in shown.items() if _is_choice(name, value, base))


def class_of(option: str, name: str) -> type:
    """The class that a name among the choices of an option stands for."""
    modules = map(importlib.import_module, _BASES[option][1])
    found: type = next(vars(module)[name] for module in modules if name in vars(module))
    return found


def base_classes() -> set[str]:
    """The names of the base classes of all options that accept a class."""
    return {base.__name__ for base, _ in _BASES.values()}


def imported(path: str) -> Any:
    """The class that an import path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _is_choice(name: str, value: object, base: type) -> bool:
    if name.startswith("_") or name in _UNUSABLE or not inspect.isclass(value) or value is base:
        return False
    return issubclass(value, base) and not inspect.isabstract(value)

"""The options that take a class: their base classes, the short names of the subclasses, and what a new class keeps."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import Logger

from grail_lightning.answers.find import AnswerForm
from grail_lightning.core.advantages import AdvantageEstimator
from grail_lightning.core.credit.base import CreditControl, TokenCredit
from grail_lightning.core.engines.base import RolloutEngine
from grail_lightning.core.objective import Objective
from grail_lightning.core.records.task import Task
from grail_lightning.core.runtime.import_path import import_function
from grail_lightning.worlds.programs.isolation import Isolation

BASES: dict[str, tuple[type, tuple[str, ...]]] = {
    "model.objective": (Objective, ("grail_lightning",)),
    "model.advantage": (AdvantageEstimator, ("grail_lightning",)),
    "model.credit": (TokenCredit, ("grail_lightning.credit",)),
    "model.credit.inner": (TokenCredit, ("grail_lightning.credit",)),
    "predictions.compare": (TokenCredit, ("grail_lightning.credit",)),
    "predictions.compare.inner": (TokenCredit, ("grail_lightning.credit",)),
    "model.control": (CreditControl, ("grail_lightning.credit",)),
    "model.engine": (RolloutEngine, ("grail_lightning",)),
    "model.optimizer": (torch.optim.Optimizer, ("torch.optim",)),
    "model.scheduler": (torch.optim.lr_scheduler.LRScheduler, ("torch.optim.lr_scheduler",)),
    "data": (LightningDataModule, ("grail_lightning",)),
    "data.task": (Task, ("grail_lightning",)),
    "data.task.answer": (AnswerForm, ("grail_lightning.answers", "grail_lightning.answers.find")),
    "data.task.isolation": (Isolation, ("grail_lightning.worlds.programs.isolation",)),
    "data.task.environment.isolation": (Isolation, ("grail_lightning.worlds.programs.isolation",)),
    "trainer.callbacks": (Callback, ("grail_lightning", "lightning.pytorch.callbacks")),
    "trainer.logger": (Logger, ("lightning.pytorch.loggers",)),
}
"""For each option that takes a class: its base class, and the modules that export the subclasses to users.

A short name such as `GRAIL` is a name in one of these modules. No other place knows where the classes are."""
_DOORS = ("grail_lightning", "grail_lightning.credit")
"""The modules for options that are not in `BASES`, such as those of a class of a user's own."""
BEGINS_ANEW = (
    *("model.objective", "model.advantage", "model.credit", "model.control", "model.engine"),
    *("data.task", "data.task.answer", "data.task.environment"),
    *("data.task.isolation", "data.task.environment.isolation"),
)
"""Options whose value, a class of another name, begins with its own options. Other classes keep those that they have,
too: another optimiser the learning rate, another logger the folder, other data the number of prompts."""
_OF_TORCH = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
UNUSABLE = {
    "LBFGS": "it cannot be used, because its step takes a function that computes the loss again",
    "ReduceLROnPlateau": "it cannot be used, because its step takes a metric",
    "SparseAdam": "it cannot be used, because it refuses dense gradients",
}
"""Classes of torch that no list shows, and why."""


def exported(option: str, name: str) -> tuple[str, type] | None:
    """The import path and the class that an option's modules export under a short name; None if none does.

    Of a module that imports its classes when they are asked for, the one class is imported. jsonargparse then knows its
    short name, too, for options whose types are known only to it.
    """
    for module in BASES.get(option, (object, _DOORS))[1]:
        candidate = getattr(importlib.import_module(module), name, None)
        if inspect.isclass(candidate):
            return f"{module}.{name}", candidate
    return None


def choices(option: str) -> list[str]:
    """The sorted names of the classes that an option accepts; empty for an option that is not in `BASES`."""
    base, modules = BASES.get(option, (object, ()))
    imported = [importlib.import_module(module) for module in modules]
    names = {name for module in imported for name in getattr(module, "__all__", vars(module)) if name[0] != "_"}
    classes = {name: entry[1] for name in names if (entry := exported(option, name))}
    accepted = {name: cls for name, cls in classes.items() if cls is not base and issubclass(cls, base)}
    return sorted(name for name, cls in accepted.items() if not inspect.isabstract(cls) and name not in UNUSABLE)


def import_path(option: str, name: str) -> str:
    """The import path of the class with a short name; a name that the option's modules do not export stays.

    So jsonargparse gets no short names of ours, of which it knows only those whose modules are imported.
    """
    export = None if "." in name or name in UNUSABLE else exported(option, name)
    return export[0] if export and issubclass(export[1], BASES[option][0]) else name


def load_for_help(arguments: Sequence[str]) -> None:
    """Import all exported classes if the arguments ask for a help, which lists the classes that are imported."""
    if any(argument in ("-h", "--help") or ".help" in argument for argument in arguments):
        for option in BASES:
            choices(option)


def class_name(value: object) -> str | None:
    """The last part of the name of a class, given by its name or with its options; None for another value."""
    name = value.get("class_path") if isinstance(value, dict) else value
    return name.rpartition(".")[2] if isinstance(name, str) else None


def find_class(option: str, name: str) -> type | None:
    """The class that an option names, by its import path or its short name; None if none is."""
    if "." in name:
        try:
            candidate: Any = import_function(name, {}, "A class", name)
        except ValueError:
            return None
    else:
        entry = exported(option, name)
        candidate = entry and entry[1]
    return candidate if inspect.isclass(candidate) else None


def options_parser(cls: type, without: Collection[str] = ()) -> ArgumentParser:
    """A parser of the options of a class that users set: not what a run gives it, as the weights to an optimiser."""
    parser = ArgumentParser(exit_on_error=False)
    torch_arguments = {"params", "optimizer"} if issubclass(cls, _OF_TORCH) else set()
    parser.add_class_arguments(cls, fail_untyped=False, skip=torch_arguments.union(without))
    return parser


def still_valid(option: str, name: str, init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of the class before that another one has, too, with values that it accepts."""
    cls = find_class(option, name)
    if cls is None or not init_args:
        return {}
    parameters, options = inspect.signature(cls).parameters.values(), {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in variable}
    for key, value in init_args.items():
        try:
            options_parser(cls, required - {key}).parse_object({key: value})
        except ArgumentError:
            continue
        options[key] = value
    return options

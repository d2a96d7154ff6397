"""The command line of each run of a sweep, parsed and checked before any run starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace

from grail_lightning.cli.errors import explain
from grail_lightning.cli.fit_options import FitOptions
from grail_lightning.cli.option_errors import refusal
from grail_lightning.cli.run_config import flat
from grail_lightning.sweep.grid import Run, Study, described, shown

# Options that name the folder, or that a user may change between two calls.
_FREE = ("trainer.logger", "trainer.default_root_dir", "trainer.enable_progress_bar", "ckpt_path")
# Folders that all runs would share.
_SHARED = (("checkpoint", "dirpath"), ("last_checkpoint", "folder"), ("export", "folder"))
QUIET = "--trainer.enable_progress_bar=false"
_TABLES = ("TensorBoardLogger", "CSVLogger")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run whose options have been parsed.

    Attributes:
        run: The run.
        arguments: The arguments of its ``fit``.
        fit: Its options, parsed; with the seed of another run of its method and task.
        saved: Its options as ``config.yaml`` has them.
    """

    run: Run
    arguments: tuple[str, ...]
    fit: Namespace
    saved: Mapping[str, Any]

    @property
    def on_gpu(self) -> bool:
        """Whether the run takes GPUs if there are some."""
        return self.fit.trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")

    @property
    def devices(self) -> int:
        """The number of devices that the run asks for; one if it takes what there is."""
        given = self.fit.trainer.get("devices", "auto")
        if isinstance(given, list):
            return len(given)
        return max(1, int(given)) if str(given).lstrip("-").isdigit() else 1

    def differing(self) -> str | None:
        """The first option that differs from those with which the run in the folder was begun; None if none does."""
        file = self.run.folder / "config.yaml"
        if not file.is_file():
            return None
        before, now = (dict(flat(tree)) for tree in (yaml.safe_load(file.read_text()), self.saved))
        for name in sorted(before.keys() & now.keys()):
            if before[name] != now[name] and not name.startswith(_FREE):
                return f"`{name}`: {before[name]} then, {now[name]} now"
        return None


class RunPlanner:
    """Plans runs.

    Args:
        study: The sweep.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self._options = FitOptions()
        self._parsed: dict[tuple[tuple[str, str], str], tuple[Namespace, dict[str, Any]]] = {}

    def plan(self, runs: Sequence[Run]) -> list[Planned]:
        """The plans of runs, which are checked. A run whose point has not been chosen is planned without one.

        Raises:
            ValueError: If an option is wrong, or a folder holds a run with other options.
        """
        planned = [self._plan(run) for run in runs]
        for plan in planned:
            if plan.run.point is not None and (differing := plan.differing()):
                raise ValueError(
                    f"{plan.run.folder} must hold a run with the options of {self.study.file}, but there is one with "
                    f"others ({differing}). Give the sweep another folder (`--output`), or remove that one."
                )
        return planned

    def _plan(self, run: Run) -> Planned:
        """The plan of a run. Runs that differ by their seeds alone are parsed once."""
        own = [f"--{name}={shown(value)}" for name, value in {**run.options, **run.values}.items()]
        given = [*(f"--config={name}" for name in run.configs), *own]
        key = (run.group, described(run.values))
        if key not in self._parsed:
            try:
                self._parsed[key] = self._parse(run, given)
            except (ArgumentError, ValueError, TypeError) as error:
                if not explain(error):
                    raise
                at = f" at {key[1]}" if run.point else ""
                where = f"{self.study.file}, {run.group[0]} on {run.group[1]}{at}"
                raise ValueError(f"{where}: {refusal(str(error))[1]}") from error
        fit, saved = self._parsed[key]
        arguments = (*given, *_into(run, fit.trainer.get("logger")), QUIET)
        return Planned(run=run, arguments=arguments, fit=fit, saved={**saved, "seed_everything": run.seed})

    def _parse(self, run: Run, given: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
        """The options of a run, and those that it will save."""
        fit = self._options.parse(given).options
        _check_alone(fit)
        whole = self._options.parse([*given, *_into(run, fit.trainer.get("logger")), QUIET])
        whole.build()
        return fit, whole.saved()


def _check_alone(fit: Namespace) -> None:
    """Check that a run keeps to its folder and to one machine."""
    if (nodes := fit.trainer.get("num_nodes", 1)) not in (1, None):
        raise ValueError(
            f"`trainer.num_nodes` must be 1 in a sweep, which starts runs on its machine, but got {nodes}."
        )
    for group, name in _SHARED:
        if fit[group].get(name) is not None:
            raise ValueError(
                f"`{group}.{name}` must be left out in a sweep, but got {fit[group][name]}: each run has a folder of "
                "its own."
            )


def _into(run: Run, given: Namespace | list[Namespace] | bool | None) -> list[str]:
    """The arguments that give a run its seed and its folder.

    Args:
        run: The run.
        given: The logger of its options.
    """
    seed, folder = f"--seed_everything={run.seed}", run.folder
    if given is False:
        return [seed, f"--trainer.default_root_dir={folder}"]
    listed = given if isinstance(given, list) else [given] if isinstance(given, Namespace) else []
    place = {"save_dir": os.fspath(folder.parent), "name": folder.name, "version": ""}
    loggers: list[dict[str, Any]] = []
    for logger in listed:
        options = logger.init_args.as_dict() if "init_args" in logger else {}
        if logger.class_path.rpartition(".")[2] in _TABLES:
            options |= place
        elif "save_dir" in options:
            options["save_dir"] = os.fspath(folder)
        loggers.append({**logger.as_dict(), "init_args": options})
    if not any(logger["class_path"].rpartition(".")[2] in _TABLES for logger in loggers):
        loggers.append({"class_path": "TensorBoardLogger", "init_args": place})  # It has the folder, and the curves.
    return [seed, f"--trainer.logger={json.dumps(loggers[0] if len(loggers) == 1 else loggers)}"]

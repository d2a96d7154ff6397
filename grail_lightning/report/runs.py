"""Finds what a run has left: its kept samples, its config and what a sweep says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grail_lightning.evaluation.records import FACTS, read_evaluation

SWEEP, CHOICE = "sweep.json", "choice__"
# Where samples are looked for in a run's folder, in this order; of several validations the last one counts.
_STAGES = ("test", "validate", "validation/step_*")
# How many folders above its samples a run's own folder can be.
_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as it has left something.

    Attributes:
        given: What the user gave.
        folder: The run's folder.
        events: The folder of the training's TensorBoard event files; None without.
        config: The resolved config of the training that made the policy, or else of the evaluation; empty without.
        sweep: What a sweep says of the run; empty without.
        name: The method's name that the user gave; None without.
    """

    given: str
    folder: Path
    events: Path | None
    config: dict[str, Any]
    sweep: dict[str, Any]
    name: str | None

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        seed = self.sweep.get("seed", self.config.get("seed_everything"))
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def task(self) -> str:
        """The sweep's name of the task; empty without one."""
        return str(self.sweep.get("task", ""))

    @property
    def point(self) -> str:
        """The values of a sweep's grid in words; empty without a grid."""
        named = mapping(self.sweep.get("point"))
        return ", ".join(f"{str(option).rpartition('.')[2]}={value}" for option, value in named.items())

    @property
    def is_over(self) -> bool:
        """Whether no sweep says that the run has still to be finished."""
        return bool(self.sweep.get("state", "finished") == "finished")


@dataclass(frozen=True, kw_only=True)
class EvaluatedRun(Run):
    """A run that has left samples.

    Attributes:
        samples: The folder of its kept samples.
        facts: What the samples belong to (``evaluation.json``).
    """

    samples: Path
    facts: dict[str, Any]


def mapping(value: object) -> Mapping[str, Any]:
    """What a file has in place of an object; empty if it has something else there."""
    return value if isinstance(value, dict) else {}


def find_runs(given: Sequence[str]) -> list[Run]:
    """The runs that a user names.

    Args:
        given: Folders of runs, of their stages or of samples, each also as ``NAME=FOLDER``.

    Raises:
        ValueError: If there is no such folder, it holds neither samples nor event files, or a run is given twice.
    """
    found: dict[Path, Run] = {}
    for argument in given:
        if Path(argument).name.startswith((CHOICE, "choice.json")) and Path(argument).is_file():
            continue  # A sweep leaves them beside the runs that choose, and `FOLDER/*` names them, too.
        run = _find(argument)
        place = run.samples if isinstance(run, EvaluatedRun) else run.folder
        other = found.setdefault(place.resolve(), run)
        if other is not run:
            twice = f"{argument} is given twice" if other.given == argument else f"{other.given} and {argument} are one"
            raise ValueError(f"Each run must be given once, but {twice}. Leave one out.")
    if not found:
        raise ValueError("A report must have at least one run. Give a folder such as runs/quickstart.")
    return list(found.values())


def _find(argument: str) -> Run:
    name, path = "", Path(argument)
    if "=" in argument and not path.exists():
        name, _, given = argument.partition("=")
        path = Path(given)
    if not path.is_dir():
        there = f"{path} is a file" if path.exists() else f"there is no folder {path}"
        raise ValueError(f"A run must be a folder, but {there}. Give one such as runs/quickstart.")
    samples = _samples(path)
    folder = _run_folder(path)
    facts = _read_facts(samples) if samples else {}
    trained = _trained_in(folder, mapping(facts.get("model")))
    events = next((place for place in (folder, trained) if any(place.glob("events.out.tfevents*"))), None)
    if samples is None and events is None:
        raise ValueError(
            f"{path} must hold the samples of an evaluation (a folder `samples` with {FACTS}) or TensorBoard's event "
            "files, but it holds neither. Run `grail-lightning test`, which keeps samples, or name another folder."
        )
    run = Run(
        given=argument,
        folder=folder,
        events=events,
        config=_read_config(trained) or _read_config(folder),
        sweep=_read_sweep(trained) or _read_sweep(folder),
        name=name or None,
    )
    return run if samples is None else EvaluatedRun(**vars(run), samples=samples, facts=facts)


def _samples(path: Path) -> Path | None:
    """The folder of samples in a folder of samples, of a stage, or of a run."""
    if (path / FACTS).is_file():
        return path
    if (path / "samples" / FACTS).is_file():
        return path / "samples"
    for stage in _STAGES:
        there = sorted(file.parent for file in path.glob(f"{stage}/samples/{FACTS}"))
        if there:
            return there[-1]
    return None


def _read_facts(samples: Path) -> dict[str, Any]:
    facts = read_evaluation(samples)
    datasets = mapping(facts.get("datasets"))
    described = all({"problems", "digest"} <= mapping(about).keys() for about in datasets.values())
    if not isinstance(facts.get("num_samples"), int) or not datasets or not described:
        raise ValueError(
            f"{samples / FACTS} must say `num_samples`, and `problems` and `digest` of each of `datasets`, but it does "
            "not. Test again."
        )
    return facts


def _run_folder(path: Path) -> Path:
    """The nearest folder above that is a run's: one with a config."""
    resolved = path.resolve()
    above = [resolved, *resolved.parents][: _DEPTH + 1]
    known = next((folder for folder in above if any(folder.glob("config*.yaml"))), None)
    return path if known is None or known == resolved else known


def _trained_in(folder: Path, model: Mapping[str, Any]) -> Path:
    """The folder of the run that trained the evaluated policy: that of its checkpoint or of its export."""
    for file in (model.get("checkpoint"), model.get("policy")):
        if isinstance(file, str) and Path(file).exists():
            for above in list(Path(file).resolve().parents)[:2]:
                if (above / "config.yaml").is_file():
                    return above
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    """The resolved config of a fit, else the newest one of another subcommand."""
    file = folder / "config.yaml"
    if not file.is_file():
        others = [f for f in folder.glob("config_*.yaml") if re.fullmatch(r"config_[a-z]+\.yaml", f.name)]
        if not others:
            return {}
        file = max(others, key=lambda other: other.stat().st_mtime)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{file} must be the config that a run left, but got: {said}. Restore or remove it.") from None
    return content if isinstance(content, dict) else {}


def _read_sweep(folder: Path) -> dict[str, Any]:
    file = folder / SWEEP
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be what a sweep left, but got: {error}. Restore or remove it.") from None
    if not isinstance(content, dict) or "method" not in content:
        raise ValueError(f"{file} must be an object with a `method`, but got {content!r:.80}. Restore or remove it.")
    return content

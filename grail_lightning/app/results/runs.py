"""Finds what runs have left, and groups them into methods: runs that differ in the seed alone."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from grail_lightning.app.results.records import FACTS, flat, read_evaluation
from grail_lightning.core.runtime.import_path import did_you_mean
from grail_lightning.core.runtime.run_folder import MARKER

_TRACES = ("events.out.*", "metrics.csv", "checkpoints", "rollouts")  # What a run leaves in its folder.
# What differs between two runs of one method: the seed, and where files are.
_INCIDENTAL = re.compile(
    r"seed_everything|ckpt_path|trainer\.(logger|default_root_dir|enable_progress_bar)(\..*)?"
    r"|checkpoint\.dirpath|last_checkpoint\.folder|export\.folder|predictions\.file"
)


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run, as far as it has left something."""

    given: str  # What the user gave.
    name: str  # The name of the method in it; empty without.
    folder: Path
    trained: Path  # The folder of the training that made the policy; `folder` if it is not known.
    events: Path | None  # The folder of the training's event files.
    samples: Path | None  # The folder of kept samples.
    facts: dict[str, Any]  # What the samples belong to (``evaluation.json``).
    sweep: dict[str, Any]  # What a sweep says of the run (``sweep.json``).
    config: dict[str, Any]  # The resolved one of the training that made the policy, or else of the test.
    method: str = ""

    @property
    def task(self) -> str:
        """The task of a sweep; a run that the user names belongs to none."""
        return "" if self.name else str(self.sweep.get("task", ""))

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        seed = self.sweep.get("seed", self.config.get("seed_everything"))
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def value_in_words(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else json.dumps(value)


def point_in_words(point: Mapping[str, Any]) -> str:
    """A point of a sweep's grid, by the last parts of the options' names."""
    return ", ".join(f"{name.rpartition('.')[2]}={value_in_words(value)}" for name, value in point.items())


def find_runs(given: Sequence[str]) -> list[LoggedRun]:
    """The runs that a user names, with their methods: folders of runs, of tests or of samples, also ``NAME=FOLDER``.

    Runs of one method are neighbours, in the order of seeds. They belong to one if the user gave them the same name;
    else if a sweep says so; else if their configs differ in nothing but the seed and the places of files. Tasks of a
    sweep are apart. A ValueError if there are no such runs, or they must not be compared.
    """
    runs: dict[Path, LoggedRun] = {}
    for argument in given:
        run = _find(argument)
        other = runs.setdefault((run.samples or run.folder).resolve(), run)
        if other is not run:
            raise ValueError(f"Each run must be given once, but {other.given} and {argument} are one. Leave one out.")
    return _with_methods(list(runs.values()))


def method_of(runs: Sequence[LoggedRun], wanted: str) -> str:
    """The method that a user names: by the name in the table, or by a run of it, its folder or that of its training."""
    names = list(dict.fromkeys(run.method for run in runs))
    if wanted in names:
        return wanted
    place = Path(wanted).resolve()
    methods = dict.fromkeys(
        run.method
        for run in runs
        if wanted in (run.given, run.folder.resolve().name, run.trained.resolve().name)
        or place in (run.folder.resolve(), run.trained.resolve(), (run.samples or run.folder).resolve())
    )
    if len(methods) == 1:
        return next(iter(methods))
    choices = ", ".join(map(repr, names))
    runs_of = f" It is a run of each of {', '.join(map(repr, methods))}." if methods else did_you_mean(wanted, names)
    raise ValueError(
        f"`--baseline` must be one of {choices}, or the folder or name of a run of it, but got {wanted!r}.{runs_of}"
    )


def _find(argument: str) -> LoggedRun:
    name, path = "", Path(argument)
    if "=" in argument and not path.exists():
        name, _, folder_name = argument.partition("=")
        path = Path(folder_name)
    if not path.is_dir():
        raise ValueError(f"A run must be a folder, but got {path}. Give one such as runs/quickstart.")
    places = path, path / "samples", path / "test" / "samples"
    samples = next((place for place in places if (place / FACTS).is_file()), None)
    above = [path, *path.resolve().parents[:2]]
    marks = "config*.yaml", "checkpoints", MARKER  # Not of a project in which the run of a program lies.
    folder = next((place for place in above if any(any(place.glob(mark)) for mark in marks)), path)
    facts = read_evaluation(samples) if samples else {}
    trained = _trained_in(facts.get("model") or {}) or folder
    events = next((place for place in (folder, trained, path) if any(place.glob("events.out.tfevents*"))), None)
    if samples is None and events is None:
        raise ValueError(
            f"{path} must hold the samples of a test (a folder `samples` with {FACTS}) or TensorBoard's event "
            "files, but it holds neither. Run `grail-lightning test`, which keeps samples, or name another folder."
        )
    return LoggedRun(
        given=argument,
        name=name,
        folder=folder,
        trained=trained,
        events=events,
        samples=samples,
        facts=facts,
        sweep=_read_first(trained / "sweep.json", folder / "sweep.json"),
        config=_read_first(trained / "config.yaml", folder / "config.yaml", folder / "config_test.yaml"),
    )


def _trained_in(model: Mapping[str, Any]) -> Path | None:
    """The folder of the run that trained the evaluated policy: that of its checkpoint or of its export."""
    files = [Path(model[name]) for name in ("checkpoint", "policy") if model.get(name) and Path(model[name]).exists()]
    folders = [above for file in files for above in file.resolve().parents[:2]]
    # A config alone may be one of the user's, beside the folder of a model.
    runs = (folder for folder in folders if any(next(folder.glob(trace), None) for trace in _TRACES))
    return next((folder for folder in runs if (folder / "config.yaml").is_file()), None)


def _read_first(*files: Path) -> dict[str, Any]:
    """The content of the first file of YAML or JSON that is there; empty without one."""
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or (file.name == "sweep.json" and "method" not in content):
            raise ValueError(f"{content!r:.60}")
        return content
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{file} must be what a run or a sweep left, but got: {error}. Restore or remove it."
        ) from None


def _with_methods(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    if len({bool(run.sweep.get("choosing")) for run in runs if run.sweep}) > 1:
        raise ValueError(
            "Runs that chose a point of a grid must not be reported beside others, which would flatter the point, but "
            "both are given. Report them apart."
        )
    groups: dict[tuple[str, str], list[LoggedRun]] = defaultdict(list)
    for run in runs:
        groups[run.task, _key(run)].append(run)
    points = Counter((task, group_runs[0].sweep.get("method")) for (task, _), group_runs in groups.items())
    grouped = list[LoggedRun]()
    for (task, _), members in groups.items():
        method = _name(members, several_points=points[task, members[0].sweep.get("method")] > 1)
        while any((run.task, run.method) == (task, method) for run in grouped):
            method += " (2)"
        members.sort(key=lambda run: (run.seed is None, run.seed or 0))
        for one, two in pairwise(members):
            if one.seed == two.seed and not (one.name and one.seed is None):  # The user says that they are runs of one.
                raise ValueError(
                    f"Runs of one method must have different seeds, but {one.given} and {two.given} (method "
                    f"{method!r}) both have {one.seed}. Leave one out, or give each a name, as NAME=FOLDER."
                )
        grouped += [replace(run, method=method) for run in members]
    return grouped


def _key(run: LoggedRun) -> str:
    """What the runs of one method have in common."""
    if run.name:
        return f"name {run.name}"
    if run.sweep:
        return json.dumps([run.sweep["method"], run.sweep.get("point")], sort_keys=True, default=str)
    if not run.config:
        return f"folder {run.folder.resolve()}"
    return repr(sorted((name, repr(value)) for name, value in flat(run.config) if not _INCIDENTAL.fullmatch(name)))


def _name(members: Sequence[LoggedRun], *, several_points: bool) -> str:
    """What the user or a sweep says; else the name of the folder, without its number if there are several."""
    first = members[0]
    if first.name:
        return first.name
    if first.sweep:
        point = point_in_words(first.sweep.get("point") or {})
        return str(first.sweep["method"]) + (f", {point}" if several_points and point else "")
    name = first.folder.resolve().name
    return (re.sub(r"[_.\- ]*(seed)?[_.\- ]*\d+$", "", name) or name) if len(members) > 1 else name


def paired_seeds(ours: Sequence[int | None], theirs: Sequence[int | None]) -> tuple[list[int], list[int], bool]:
    """The indices of the seeds to compare, of each of two methods, and whether they are paired by seed.

    They are paired if at least two seeds are in common, or if one of the methods has a single seed and the other one
    has it, too. Otherwise all seeds are compared.
    """
    common = [seed for seed in ours if seed in theirs]
    if None in ours or None in theirs or len(common) < min(2, len(ours), len(theirs)):
        return [*range(len(ours))], [*range(len(theirs))], False
    return [ours.index(seed) for seed in common], [theirs.index(seed) for seed in common], True

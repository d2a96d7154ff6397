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

from grail_lightning.evaluate.records import FACTS, read_evaluation

CHOICE = "choice__"  # What the files begin with that a sweep leaves beside the runs that choose.
_STAGES = ("test", "validate", "validation/step_*")  # Of several validations the last one counts.
# What differs between two runs of one method: the seed, and where files are.
_INCIDENTAL = [
    *("seed_everything", "ckpt_path", "trainer.logger", "trainer.default_root_dir", "trainer.enable_progress_bar"),
    *("checkpoint.dirpath", "last_checkpoint.folder", "export.folder", "predictions.file"),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as it has left something."""

    # What the user gave, and the name of the method in it.
    given: str
    name: str
    folder: Path
    # The folder of the training's event files, and of kept samples; None without.
    events: Path | None
    samples: Path | None
    # What the samples belong to (``evaluation.json``), and what a sweep says of the run (``sweep.json``).
    facts: dict[str, Any]
    sweep: dict[str, Any]
    # The resolved config of the training that made the policy, or else of the evaluation.
    config: dict[str, Any]
    method: str = ""
    task: str = ""

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        seed = self.sweep.get("seed", self.config.get("seed_everything"))
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def point(self) -> str:
        """The values of a sweep's grid in words; empty without a grid."""
        named = self.sweep.get("point") or {}
        return ", ".join(f"{option.rpartition('.')[2]}={value}" for option, value in named.items())


def find_runs(given: Sequence[str]) -> list[Run]:
    """The runs that a user names: folders of runs, of their stages or of samples, each also as ``NAME=FOLDER``."""
    runs: dict[Path, Run] = {}
    for argument in given:
        if Path(argument).name.startswith((CHOICE, "choice.json")) and Path(argument).is_file():
            continue  # `FOLDER/*` names them, too.
        run = _find(argument)
        other = runs.setdefault((run.samples or run.folder).resolve(), run)
        if other is not run:
            raise ValueError(f"Each run must be given once, but {other.given} and {argument} are one. Leave one out.")
    if not runs:
        raise ValueError("A report must have at least one run. Give a folder such as runs/quickstart.")
    return list(runs.values())


def _find(argument: str) -> Run:
    name, path = "", Path(argument)
    if "=" in argument and not path.exists():
        name, _, folder_name = argument.partition("=")
        path = Path(folder_name)
    if not path.is_dir():
        raise ValueError(f"A run must be a folder, but got {path}. Give one such as runs/quickstart.")
    places = [path, path / "samples"]
    for stage in _STAGES:
        places += sorted(path.glob(f"{stage}/samples"), reverse=True)
    samples = next((place for place in places if (place / FACTS).is_file()), None)
    above = [path, *path.resolve().parents[:4]]  # Of the samples of a validation, the run's folder is the fourth.
    folder = next((place for place in above if any(place.glob("config*.yaml"))), path)
    facts = read_evaluation(samples) if samples else {}
    trained = _trained_in(folder, facts.get("model") or {})
    events = next((place for place in (folder, trained) if any(place.glob("events.out.tfevents*"))), None)
    if samples is None and events is None:
        raise ValueError(
            f"{path} must hold the samples of an evaluation (a folder `samples` with {FACTS}) or TensorBoard's event "
            "files, but it holds neither. Run `grail-lightning test`, which keeps samples, or name another folder."
        )
    config = _read_object(trained / "config.yaml") or _read_object(folder / "config.yaml")
    for other in sorted(folder.glob("config_*.yaml"), key=lambda file: file.stat().st_mtime):
        config = config or _read_object(other)
    sweep = _read_object(trained / "sweep.json") or _read_object(folder / "sweep.json")
    return Run(
        given=argument,
        name=name,
        folder=folder,
        events=events,
        samples=samples,
        facts=facts,
        sweep=sweep,
        config=config,
    )


def _trained_in(folder: Path, model: Mapping[str, Any]) -> Path:
    """The folder of the run that trained the evaluated policy: that of its checkpoint or of its export."""
    for file in (model.get("checkpoint"), model.get("policy")):
        if isinstance(file, str) and Path(file).exists():
            for above in Path(file).resolve().parents[:2]:
                if (above / "config.yaml").is_file():
                    return above
    return folder


def _read_object(file: Path) -> dict[str, Any]:
    """The content of a file of YAML or JSON; empty without the file."""
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or (file.name == "sweep.json" and "method" not in content):
            raise ValueError(f"{content!r:.60}")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{file} must be what a run or a sweep left, but got: {error}. Restore or remove it."
        ) from None
    return content


def with_methods(runs: Sequence[Run]) -> list[Run]:
    """The runs with the names of their methods and tasks; runs of one method are neighbours, in the order of seeds.

    Runs belong to one method if the user gave them the same name; else if a sweep says so; else if their configs differ
    in nothing but the seed and the places of files. Tasks of a sweep are apart; runs of one task are together with runs
    of no task, if there are some.
    """
    tasks = dict.fromkeys(str(run.sweep.get("task", "")) for run in runs)
    if "" in tasks and len(tasks) > 2:
        raise ValueError(
            "Runs are compared within a task of a sweep, but some belong to none, and others to "
            f"{', '.join(filter(None, tasks))}. Report the runs of no task beside those of one task."
        )
    if len({bool(run.sweep.get("choosing")) for run in runs if run.sweep}) > 1:
        raise ValueError(
            "Runs that chose a point of a grid must not be reported beside others, which would flatter the point, but "
            "both are given. Report them apart."
        )
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        task = "" if "" in tasks else str(run.sweep.get("task", ""))
        groups[task, _key(run)].append(run)
    points = Counter((task, of[0].sweep["method"]) for (task, _), of in groups.items() if of[0].sweep)
    grouped: list[Run] = []
    for (task, _), members in groups.items():
        alone = points[task, members[0].sweep.get("method")] == 1
        name, number = _name(members, alone), 2
        method, taken = name, {run.method for run in grouped if run.task == task}
        while method in taken:
            method, number = f"{name} ({number})", number + 1
        members.sort(key=lambda run: (run.seed is None, run.seed or 0))
        for one, two in pairwise(members):
            if one.seed == two.seed:
                raise ValueError(
                    f"Runs of one method must have different seeds, but {one.given} and {two.given} (method "
                    f"{method!r}) both have {one.seed}. Leave one out, or name them as methods: NAME={two.given}."
                )
        grouped += [replace(run, method=method, task=task) for run in members]
    return grouped


def _key(run: Run) -> str:
    """What the runs of one method have in common."""
    if run.name:
        return f"name {run.name}"
    if run.sweep:
        return json.dumps([run.sweep["method"], run.sweep.get("point")], sort_keys=True, default=str)
    if not run.config:
        return f"folder {run.folder.resolve()}"
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in run.config.items()}
    for option in _INCIDENTAL:
        above, _, name = option.rpartition(".")
        tree = config.get(above) if above else config
        if isinstance(tree, dict):
            tree.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _name(members: Sequence[Run], alone: bool) -> str:
    """What the user or a sweep says; else the name of the folder, without its number if there are several."""
    first = members[0]
    if first.name:
        return first.name
    if first.sweep:
        return str(first.sweep["method"]) + ("" if alone or not first.point else f", {first.point}")
    name = first.folder.resolve().name
    return (re.sub(r"[_.\- ]*(seed)?[_.\- ]*\d+$", "", name) or name) if len(members) > 1 else name


def paired_seeds(ours: Sequence[int | None], theirs: Sequence[int | None]) -> list[tuple[int, int]]:
    """The places of the seeds that two methods have in common; none if they cannot be paired.

    They can if at least two are in common, or if one of the methods has a single seed and the other one has it, too.
    """
    common = [seed for seed in ours if seed in theirs]
    if None in ours or None in theirs or len(common) < min(2, len(ours), len(theirs)):
        return []
    return [(ours.index(seed), theirs.index(seed)) for seed in common]

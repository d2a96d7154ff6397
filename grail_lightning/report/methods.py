"""Runs of one method with several seeds belong together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from grail_lightning.report.runs import EvaluatedRun, Run

# What differs between two runs of one method: the seed, and where files are.
_INCIDENTAL = (
    ("seed_everything",),
    ("ckpt_path",),
    ("trainer", "logger"),
    ("trainer", "default_root_dir"),
    ("trainer", "enable_progress_bar"),
    ("checkpoint", "dirpath"),
    ("last_checkpoint", "folder"),
    ("export", "folder"),
    ("predictions", "file"),
)


@dataclass(frozen=True, kw_only=True)
class Method:
    """The runs of one method.

    Attributes:
        name: Its name, which no other method of the same task has.
        task: The sweep's name of the task; empty without one, and where its runs are compared with others.
        runs: One run for each seed, in the order of the seeds.
    """

    name: str
    task: str
    runs: tuple[Run, ...]

    @property
    def evaluated(self) -> tuple[EvaluatedRun, ...]:
        """The runs that have samples."""
        return tuple(run for run in self.runs if isinstance(run, EvaluatedRun))

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """The seeds of all runs."""
        return tuple(run.seed for run in self.runs)


def find_methods(runs: Sequence[Run]) -> list[Method]:
    """The methods of runs, in the order in which their first runs were given.

    Runs belong to one method if the user gave them the same name; else if a sweep says so; else if their configs differ
    in nothing but the seed and the places of files. A run without a config is a method of its own.

    The tasks of a sweep are apart. Runs of one task are together with runs of no task, if there are some.

    Args:
        runs: The runs.

    Raises:
        ValueError: If two runs of one method have the same seed, runs of no task stand beside those of several, or
            runs that chose a point of a sweep's grid beside others.
    """
    _check_tasks(runs)
    _check_choosing(runs)
    apart = all(run.task for run in runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        task = run.task if apart else ""
        groups.setdefault((task, _key(run)), []).append(run)
    points = Counter(
        (task, run.sweep["method"]) for (task, _), (run, *_) in groups.items() if run.sweep and run.name is None
    )
    found: list[Method] = []
    for (task, _), members in groups.items():
        alone = points[task, members[0].sweep.get("method")] == 1
        name = _unused(_name(members, alone), [method.name for method in found if method.task == task])
        found.append(Method(name=name, task=task, runs=tuple(sorted(members, key=_by_seed))))
    for method in found:
        _check_seeds(method)
    return found


def paired_places(
    ours: Sequence[int | None], theirs: Sequence[int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The places of the seeds that two methods have in common, in the same order; None if they cannot be paired.

    They can if at least two are in common, or if one of the methods has a single seed and the other one has it, too.

    Args:
        ours: The seeds of one method.
        theirs: The seeds of the other one.
    """
    common = [seed for seed in ours if seed in theirs]
    if None in ours or None in theirs or len(common) < min(2, len(ours), len(theirs)):
        return None
    return tuple(ours.index(seed) for seed in common), tuple(theirs.index(seed) for seed in common)


def _check_tasks(runs: Sequence[Run]) -> None:
    tasks = list(dict.fromkeys(run.task for run in runs if run.task))
    without = next((run for run in runs if not run.task), None)
    if without is not None and len(tasks) > 1:
        raise ValueError(
            f"Runs are compared within a task of a sweep, but {without.given} belongs to none, and others to "
            f"{', '.join(tasks)}. Leave it out, or report it beside the runs of one task."
        )


def _check_choosing(runs: Sequence[Run]) -> None:
    reported = next((run for run in runs if run.sweep and not run.sweep.get("choosing")), None)
    choosing = next((run for run in runs if run.sweep.get("choosing")), None)
    if reported is not None and choosing is not None:
        raise ValueError(
            f"Runs that chose a point of a grid must not be reported beside others, which would flatter the point, but "
            f"{choosing.given} is one and {reported.given} is not. Report them apart."
        )


def _key(run: Run) -> str:
    if run.name is not None:
        return json.dumps(["name", run.name])
    if run.sweep:
        return json.dumps(["sweep", run.sweep["method"], run.sweep.get("point")], sort_keys=True, default=str)
    if run.config:
        return json.dumps(["config", _without_incidental(run.config)], sort_keys=True, default=str)
    return json.dumps(["folder", str(run.folder.resolve())])


def _without_incidental(config: dict[str, Any]) -> dict[str, Any]:
    kept = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    for *above, name in _INCIDENTAL:
        tree = kept.get(above[0]) if above else kept
        if isinstance(tree, dict):
            tree.pop(name, None)
    return kept


def _name(members: Sequence[Run], alone: bool) -> str:
    """What the user or a sweep says; else what the names of the folders have in common.

    Args:
        members: The runs of the method.
        alone: Whether no other point of a sweep's grid has the same method.
    """
    first = members[0]
    if first.name is not None:
        return first.name
    if first.sweep:
        return str(first.sweep["method"]) + ("" if alone or not first.point else f", {first.point}")
    names = [run.folder.resolve().name for run in members]
    if len(members) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    common = "".join(letters[0] for letters in same).rstrip("0123456789").rstrip("_-. ")
    return common.removesuffix("seed").rstrip("_-. ") or names[0]


def _unused(name: str, taken: Sequence[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free


def _by_seed(run: Run) -> tuple[bool, int]:
    return run.seed is None, run.seed or 0


def _check_seeds(method: Method) -> None:
    if len(method.runs) < 2:
        return
    first: dict[int | None, Run] = {}
    for run in method.runs:
        if (other := first.setdefault(run.seed, run)) is not run:
            raise ValueError(
                f"Runs of one method must have different seeds, but {other.given} and {run.given} (method "
                f"{method.name!r}) both have {run.seed}. Leave one out, or name them as methods: NAME={run.given}."
            )

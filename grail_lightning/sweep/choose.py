"""The choice of the best point of a grid, on runs that are not reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from grail_lightning.evaluate.curves import read_scalars
from grail_lightning.evaluate.runs import CHOICE
from grail_lightning.runtime.writable import write_whole
from grail_lightning.sweep.grid import Choice, Run, Study, described, file_name


def choose(study: Study, choice: Choice, group: tuple[str, str]) -> dict[str, Any]:
    """The point with the largest mean figure over the choosing seeds, for a method on a task.

    The first of several equal ones is taken. A run whose figure is not finite counts as −∞. What was chosen, and from
    which figures, is written to `choice_file`.

    Args:
        study: The sweep.
        choice: How it chooses.
        group: The method and the task.

    Raises:
        ValueError: If a run has no such curve.
    """
    points: dict[str, dict[str, Any]] = {}
    figures: dict[str, list[float]] = {}
    for run in study.choosing(group):
        name = described(run.values)
        points[name] = dict(run.values)
        figures.setdefault(name, []).append(figure(run, choice))
    best = max(figures, key=lambda name: sum(figures[name]) / len(figures[name]))
    entry = {"method": group[0], "task": group[1], "chosen": best, "figures": figures}
    write_whole(choice_file(study, group), json.dumps(entry, indent=1) + "\n")
    return points[best]


def choice_file(study: Study, group: tuple[str, str]) -> Path:
    """The file that says what was chosen for a method on a task, in the folder of the runs that choose.

    There is one for each of them, so that tasks of an array that choose at the same time share none.
    """
    return study.choosing_folder / f"{CHOICE}{file_name(*group)}.json"


def told(point: dict[str, Any], group: tuple[str, str], study: Study) -> str:
    """The choice in words. A point at the edge of its grid is said to be there: a better one may lie outside."""
    edges = []
    for name, value in point.items():
        values = [run.values[name] for run in study.choosing(group)]
        numbers = all(isinstance(number, (int, float)) for number in values) and len(set(values)) > 2
        if numbers and value in (min(values), max(values)):
            edges.append(name.rpartition(".")[2])
    at_edge = f" ({', '.join(edges)} at the edge of the grid)" if edges else ""
    return f"{group[0]}, {group[1]}: {described(point)} is best of the grid on the choosing seeds{at_edge}"


def figure(run: Run, choice: Choice) -> float:
    """What a run is chosen by: the last value of its curve, or the mean over the curve.

    Raises:
        ValueError: If the run has no such curve.
    """
    values = list(read_scalars(run.folder, choice.by).values())
    if not values:
        raise ValueError(
            f"`choose.by` must be the tag of a curve of each run, but {run.folder} has no {choice.by!r} in its event "
            "files. Correct it, and give the runs a TensorBoardLogger."
        )
    found = values[-1] if choice.statistic == "last" else sum(values) / len(values)
    return found if math.isfinite(found) else -math.inf

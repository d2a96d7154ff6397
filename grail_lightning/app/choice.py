"""Sweeps in which each method has its best point of a grid, chosen on seeds that are not reported.

With ``choose``, each method first runs its grid on seeds of its own, on each task, and the other seeds are run at the
best point. A run may be known from a row of a table of finished runs, in place of its folder. ``scripts/study.py`` runs
the files of such studies (the page "A study of six methods" describes them), and
`grail_lightning.app.benchmark.training` trains a credit method.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from grail_lightning.app import sweep
from grail_lightning.app.results.differences import CURVE, read_scalars
from grail_lightning.app.results.runs import point_in_words
from grail_lightning.core.runtime.files import write_whole


class Row(NamedTuple):
    """What a table has of a finished run: its options, as one line of a shell, and its curves by their tags."""

    options: str
    curves: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, kw_only=True)
class StudyRun(sweep.SweepRun):
    """One run of a study. The point of a run that waits is not yet chosen, and empty."""

    choosing: bool  # It serves to choose a point, and is not reported.
    waits: bool
    row: Row | None  # In the table of finished runs.

    @property
    def group(self) -> tuple[str, str]:
        """For which one point is chosen."""
        return self.method, self.task

    def check(self) -> None:
        """Check that the row, or the folder, is that of a run with these options."""
        if self.row is None:
            super().check()
        elif self.row.options != shlex.join(self.given):
            raise ValueError(
                f"{self.folder} must be a run with these options, but `results.file` has a row of one with others. "
                "Give the study another table, or remove that row."
            )

    def curve(self, tag: str) -> dict[int, float]:
        """A curve of the run, from its row or its folder, to six decimals; empty if it has none."""
        if self.row:
            return dict(self.row.curves.get(tag, {}))
        return {step: round(value, 6) for step, value in read_scalars(self.folder, tag).items()}

    def record(self) -> dict[str, Any]:
        """What is known of the run; one that has a row is finished."""
        return {"state": "finished"} if self.row else super().record()

    def write(self, **state: object) -> None:
        """Record the state of the run."""
        super().write(**({"choosing": True} if self.choosing else {}), **state)


class Study(NamedTuple):
    """A study: its runs, those that choose first, and what its file says of the choice."""

    runs: list[StudyRun]
    choose: dict[str, Any]

    def first_point(self, run: StudyRun) -> StudyRun:
        """The run itself, or at the first point of its grid if its point is not yet chosen."""
        if not run.waits:
            return run
        return replace(
            run, point=next(other.point for other in self.runs if other.choosing and other.group == run.group)
        )

    def selected(self, call: Any) -> list[StudyRun]:
        """The runs of a call: those of a sweep, with the ones that choose for them unless it is for one alone."""
        runs = sweep.selected(self.runs, call)
        groups = {run.group for run in runs if run.waits and call.only}
        return [run for run in self.runs if run in runs or (run.choosing and run.group in groups)]

    def run(self, runs: Sequence[StudyRun], runner: sweep.Runner) -> bool:
        """Run those that choose, choose, and run the others at the chosen points. True if all are finished then."""
        if not runner.run([run for run in runs if run.choosing]):
            return False
        reported = self.at_chosen_points([run for run in runs if not run.choosing])
        for run in reported:
            run.check()  # Another choice, with another grid say, may have begun it at another point.
        return runner.run(reported)

    def at_chosen_points(self, runs: Sequence[StudyRun], say: Callable[[str], None] = sweep.say) -> list[StudyRun]:
        """The runs, of which those that wait have the best points; all runs that choose must be finished.

        The figures of a choice are written to a file beside the folder of the runs that choose.
        """
        points = {}
        for method, task in {run.group: None for run in runs if run.waits}:
            points[method, task], entry = self.best((method, task))
            folder = runs[0].folder.parent
            write_whole(
                folder.with_name(f"{folder.name}_choices") / f"{sweep.file_name(method, task)}.json",
                json.dumps({"method": method, "task": task, **entry}, indent=1) + "\n",
            )
            say(f"{method}, {task}: {entry['chosen']} is best on the choosing seeds")
        return [replace(run, point=points[run.group], waits=False) if run.waits else run for run in runs]

    def best(self, group: tuple[str, str]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The point with the largest mean figure over the choosing seeds; its name, and the figures of all points."""
        figures, points, last = dict[str, list[float]](), {}, self.choose.get("statistic", "last") == "last"
        for run in self.runs:
            if not run.choosing or run.group != group:
                continue
            if run.record()["state"] != "finished":
                raise ValueError(
                    f"The point of {run.method} on {run.task} waits for {run.folder}, which is not finished."
                )
            values = [*run.curve(self.choose.get("by", CURVE)).values()]
            if not values:
                raise ValueError(f"`choose.by` must be the tag of a curve of each run, but {run.folder} has none.")
            name = point_in_words(run.point)
            points[name] = run.point
            figures.setdefault(name, []).append(values[-1] if last else sum(values) / len(values))
        means = {name: sum(values) / len(values) for name, values in figures.items()}
        chosen = pd.Series(means).idxmax()  # NaN is never the largest.
        return points[chosen], {"chosen": chosen, "figures": figures}


def study_of(
    content: Mapping[str, Any], row_of: Callable[[sweep.SweepRun], Row | None], output: Path | None = None
) -> Study:
    """The study of the content of its file. `row_of` gives the row of a run, and `output` replaces its `folder`."""
    choose = check_choose(content)
    runs = sweep.runs_of(content, output)
    choosing, reported = _with_choice(content, runs, choose["seeds"]) if choose else ([], runs)
    methods = {run.method for run in choosing}
    marked = [(run, True) for run in choosing] + [(run, False) for run in reported]
    return Study(
        [
            StudyRun(**vars(run), choosing=chooses, waits=not chooses and run.method in methods, row=row_of(run))
            for run, chooses in marked
        ],
        choose,
    )


def check_choose(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `choose` of the content of a file, which is empty without one; a ValueError if it is wrong."""
    choose = content.get("choose", {})
    allowed = isinstance(choose, dict) and choose.keys() <= {"seeds", "by", "statistic"}
    allowed = allowed and choose.get("statistic", "last") in ("last", "mean")
    what = "`choose` must hold `seeds`, a list of integers, and may hold `by`, a tag, and `statistic`, last or mean"
    sweep.must(allowed and (not choose or sweep.are_seeds(choose.get("seeds"))), what, choose)
    return dict(choose)


def _with_choice(
    content: Mapping[str, Any], runs: Sequence[sweep.SweepRun], seeds: list[int]
) -> tuple[list[sweep.SweepRun], list[sweep.SweepRun]]:
    """The runs that choose, point by point, and those that are reported; `runs` are all points of a sweep."""
    folder, methods = runs[0].folder.parent, {name: options or {} for name, options in content["methods"].items()}
    points = {name: {point_in_words(run.point) for run in runs if run.method == name} for name in methods}
    several = [name for name in methods if len(points[name]) > 1]
    for name in several:
        shared = {*seeds} & {run.seed for run in runs if run.method == name}
        sweep.must(not shared, f"`choose.seeds` must be other seeds than those of {name!r}", shared)
    if not several:
        return [], [*runs]
    of_choice = {name: {key: methods[name][key] for key in methods[name] if key != "seeds"} for name in several}
    choosing = sweep.runs_of(
        {**content, "methods": of_choice, "seeds": seeds}, folder.with_name(f"{folder.name}_choosing")
    )
    order = list(dict.fromkeys((run.method, run.task, point_in_words(run.point)) for run in choosing))
    choosing.sort(key=lambda run: order.index((run.method, run.task, point_in_words(run.point))))
    without = {name: {**options, "grid": {}} if name in several else options for name, options in methods.items()}
    return choosing, sweep.runs_of({**content, "methods": without}, folder)

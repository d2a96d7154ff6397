"""Run a study: a sweep in which each method has its best point of a grid, and finished runs are rows of a table.

    python scripts/study.py configs/study/baseline.yaml --list
    python scripts/study.py configs/study/baseline.yaml --only '*five_terms*'

The file is that of `python -m grail_lightning.sweep`, with two keys more. With `choose`, each method first runs its
grid on seeds of its own, and reports the other seeds at the best point. `results` names the table. docs/study.md
describes both. Called again, the script goes on as the sweep does.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from study_tables import curve, read_results

from grail_lightning.app import sweep
from grail_lightning.app.cli.app import mistakes_in_one_line
from grail_lightning.app.cli.trainer_options import environments_of_runs
from grail_lightning.app.results.differences import CURVE, read_scalars
from grail_lightning.app.results.runs import point_in_words
from grail_lightning.core.runtime.files import write_whole

_WRITING = threading.Lock()
FACTS = ("run", "method", "task", "seed", "point", "choosing", "options")  # The first columns of a table.


@dataclass(frozen=True, kw_only=True)
class StudyRun(sweep.SweepRun):
    """One run of a study. The point of a run that waits is not yet chosen, and empty."""

    choosing: bool  # It serves to choose a point, and is not reported.
    waits: bool
    row: Mapping[str, str] | None  # In the table of finished runs.

    @property
    def group(self) -> tuple[str, str]:
        """For which one point is chosen."""
        return self.method, self.task

    def check(self) -> None:
        """Check that the row, or the folder, is that of a run with these options."""
        if self.row is None:
            super().check()
        elif self.row["options"] != shlex.join(self.given):
            raise ValueError(
                f"{self.folder} must be a run with these options, but `results.file` has a row of one with others. "
                "Give the study another table, or remove that row."
            )

    def curve(self, tag: str) -> dict[int, float]:
        """A curve of the run, from its row or its folder, to six decimals."""
        if self.row:
            return curve(self.row, tag)
        return {step: round(value, 6) for step, value in read_scalars(self.folder, tag).items()}

    def record(self) -> dict[str, Any]:
        """What is known of the run; one that has a row is finished."""
        return {"state": "finished"} if self.row else super().record()

    def write(self, **state: object) -> None:
        """Record the state of the run."""
        super().write(**({"choosing": True} if self.choosing else {}), **state)


class Table(NamedTuple):
    """A table of finished runs: its file, and the tags of its curves."""

    file: Path
    tags: list[str]

    def rows(self) -> dict[str, dict[str, str]]:
        """The rows by the names of runs; none if there is no file. An error if it has other columns."""
        columns = [*FACTS, *self.tags]
        rows = {row["run"]: row for row in read_results(self.file)} if self.file.exists() else {}
        if other := next((row for row in rows.values() if list(row) != columns), None):
            raise ValueError(
                f"`results.file` must be a table with the columns {', '.join(columns)}, but {self.file} has "
                f"{', '.join(other)}. Name another file, or the curves of that table in `results.curves`."
            )
        return rows

    def add(self, run: StudyRun) -> None:
        """Add a finished run without a row. Several studies may add to one table, and git can merge its lines."""
        if run.row:
            return
        row: dict[str, object] = {"run": run.folder.name, "method": run.method, "task": run.task, "seed": run.seed}
        row |= {"point": run.point, "choosing": run.choosing, "options": shlex.join(run.given)}
        row |= {tag: run.curve(tag) for tag in self.tags}
        cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        with _WRITING:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame([cells]).to_csv(self.file, mode="a", header=not self.file.exists(), index=False)


class Study(NamedTuple):
    """A study: its runs, those that choose first, and what its file says of the choice and of the table."""

    runs: list[StudyRun]
    choose: dict[str, Any]
    table: Table | None

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
        points = {group: self.best(group) for group in {run.group: None for run in runs if run.waits}}
        reported = [
            replace(run, point=points[run.group], waits=False) if run.waits else run for run in runs if not run.choosing
        ]
        for run in reported:
            run.check()  # Another choice, with another grid say, may have begun it at another point.
        return runner.run(reported)

    def best(self, group: tuple[str, str]) -> Mapping[str, Any]:
        """The point with the largest mean figure over the choosing seeds, written to a file beside their folder."""
        figures, points, last = dict[str, list[float]](), {}, self.choose.get("statistic", "last") == "last"
        choosing = [run for run in self.runs if run.choosing and run.group == group]
        for run in choosing:
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
        entry = {"method": group[0], "task": group[1], "chosen": chosen, "figures": figures}
        folder = choosing[0].folder.parent
        file = folder.with_name(f"{folder.name.removesuffix('_choosing')}_choices") / f"{sweep.file_name(*group)}.json"
        write_whole(file, json.dumps(entry, indent=1) + "\n")
        print(f"{', '.join(group)}: {chosen} is best on the choosing seeds", flush=True)
        return points[chosen]


def read_study(file: Path, output: Path | None = None) -> Study:
    """The study of a YAML file. `output` replaces its `folder`."""
    content = sweep.read_file(file, (*sweep.KEYS, "choose", "results"))
    choose, results = content.get("choose", {}), content.get("results")
    allowed = isinstance(choose, dict) and choose.keys() <= {"seeds", "by", "statistic"}
    allowed = allowed and choose.get("statistic", "last") in ("last", "mean")
    what = "`choose` must hold `seeds`, a list of integers, and may hold `by`, a tag, and `statistic`, last or mean"
    sweep.must(allowed and (not choose or sweep.are_seeds(choose.get("seeds"))), what, choose)
    table = None
    if results is not None:
        allowed = isinstance(results, dict) and {"file"} <= results.keys() <= {"file", "curves"}
        what = "`results` must hold `file`, and beside it only `curves`, a list"
        sweep.must(allowed and isinstance(results.get("curves", []), list), what, results)
        by = [choose.get("by", CURVE)]
        tags = dict.fromkeys([*results.get("curves", by), *(by if choose else [])])
        table = Table(Path(results["file"]), list(tags))
    runs = sweep.runs_of(content, output)
    if choose:
        choosing, reported = with_choice(content, runs, choose["seeds"])
    else:
        choosing, reported = [], runs
    rows = table.rows() if table else {}
    methods = {run.method for run in choosing}
    return Study(
        [
            StudyRun(
                **vars(run),
                choosing=chooses,
                waits=not chooses and run.method in methods,
                row=rows.get(run.folder.name),
            )
            for part, chooses in ((choosing, True), (reported, False))
            for run in part
        ],
        choose,
        table,
    )


def with_choice(
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


def main(arguments: list[str] | None = None) -> None:
    """Run a study. A user's mistake is one line, with exit code 2; exit code 1 says that runs are not finished."""
    call = sweep.parse_call("python scripts/study.py", (__doc__ or "").partition("\n")[0], arguments)
    with mistakes_in_one_line(__file__):
        study = read_study(call.file, call.output)
        runs = study.selected(call)
        for run in runs:
            if not run.waits:
                run.check()
        devices = sweep.check_options([study.first_point(run) for run in runs])
        if call.list:
            for run in runs:
                print(sweep.line_of(run) + (", at the point that will be chosen" if run.waits else ""))
            return
        how = {"when_finished": study.table.add} if study.table else {}
        runner = sweep.Runner(environments_of_runs(call.jobs, devices), **how)
        runner.stop_at_signals()
        done = study.run(runs, runner)
        print(sweep.last_words(done, len(runs), len(study.runs)))
    raise SystemExit(not done)


if __name__ == "__main__":
    main()

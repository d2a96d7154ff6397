"""``python -m grail_lightning.sweep FILE``: methods × tasks × seeds, each a `grail-lightning fit` in its own folder.

Called again, it goes on: finished runs are skipped, others resume from their last checkpoint. With `choose`, each
method first runs its grid on seeds of its own, and reports the other seeds at the best point. docs/sweeps.md has the
format of the file.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import NonNegativeInt

from grail_lightning.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.cli.config_files import find_config, read_options
from grail_lightning.cli.mistakes import option_error
from grail_lightning.cli.trainer_options import environments_of_runs
from grail_lightning.evaluate.compare import CURVE, curve, read_scalars, results_by_run
from grail_lightning.evaluate.runs import CHOICE, point_in_words, value_in_words
from grail_lightning.runtime.files import held, write_whole
from grail_lightning.runtime.run_folder import mark_if_new

_FOLDERS = r"checkpoint\.dirpath|last_checkpoint\.folder|export\.folder"  # All runs would write there.
_OURS = re.compile(rf"(seed_everything|ckpt_path|trainer\.logger|trainer\.default_root_dir|{_FOLDERS})(\..*)?")
_FACTS = ("method", "task", "seed", "point", "choosing")  # What a record, and a row of the table, say of a run.
_NO_STEP = "no step is left"  # What `fit` says of a resume after the last step.
Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choose:
    """How a sweep chooses the point of a grid."""

    seeds: list[NonNegativeInt]
    by: str = CURVE
    statistic: Literal["last", "mean"] = "last"


@dataclass(frozen=True, kw_only=True)
class Results:
    """The table of finished runs."""

    file: str
    curves: list[str] = field(default_factory=lambda: [CURVE])


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The file of a sweep, which docs/sweeps.md describes; for one method, with the grid and the seeds of its own."""

    folder: str
    methods: dict[str, Options | None]
    tasks: dict[str, Options | None]
    seeds: list[NonNegativeInt]
    config: str | list[str] = field(default_factory=list)
    options: Options = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    choose: Choose | None = None
    results: Results | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep. `options` are without those of the grid, of which `point` is None until it is chosen."""

    folder: Path
    method: str
    task: str
    seed: int
    options: tuple[str, ...]
    point: Mapping[str, Any] | None
    choosing: bool  # It serves to choose a point, and is not reported.
    row: Mapping[str, str] | None  # In the table of finished runs.

    @property
    def group(self) -> tuple[str, str]:
        """For which one point is chosen."""
        return self.method, self.task

    @property
    def given(self) -> list[str]:
        """The options that the file gives, those of the point last."""
        return [*self.options, *(f"--{name}={value_in_words(value)}" for name, value in (self.point or {}).items())]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``fit``; without a point, those without the options of the grid."""
        place = {"save_dir": str(self.folder.parent), "name": self.folder.name, "version": ""}
        logger = json.dumps({"class_path": "TensorBoardLogger", "init_args": place})
        ours = (f"--seed_everything={self.seed}", f"--trainer.logger={logger}", "--trainer.enable_progress_bar=false")
        return [*self.given, *ours]

    def check(self) -> None:
        """Check that the folder, or the row, is that of a run with these options, if its point is known."""
        if self.point is None:
            return
        there = self.row["options"] if self.row else shlex.join(self.record().get("arguments", self.arguments))
        if there != shlex.join(self.given if self.row else self.arguments):
            raise ValueError(
                f"{self.folder} must hold a run with these options, but there is one with others, or a row of one in "
                "`results.file`. Give the sweep another folder (`--output`) or table, or remove that run or row."
            )

    def curve(self, tag: str) -> dict[int, float]:
        """A curve of the run, from its row or its folder, to six decimals."""
        if self.row:
            return curve(self.row, tag)
        return {step: round(value, 6) for step, value in read_scalars(self.folder, tag).items()}

    def record(self) -> dict[str, Any]:
        """What is known of the run; `state` is waiting, started, failed or finished."""
        if self.row:
            return {"state": "finished"}
        file = self.folder / "sweep.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {"state": "waiting"}

    def write(self, **state: str) -> None:
        """Record the state of the run."""
        record = {name: getattr(self, name) for name in _FACTS} | {"point": self.point or None}
        record |= {"arguments": self.arguments, **state}
        write_whole(self.folder / "sweep.json", json.dumps(record, indent=1) + "\n")

    def last_line(self) -> str:
        """What the run has printed last."""
        log = self.folder / "fit.log"
        lines = log.read_text(errors="replace").strip().split("\n") if log.exists() else [""]
        return lines[-1].strip()


def read_sweep(file: Path, output: Path | None = None) -> tuple[list[Run], Sweep]:
    """The runs of a YAML file, those that choose first, and its content. `output` replaces its `folder`."""
    content = read_options(find_config(file), "The file of a sweep") | ({"folder": str(output)} if output else {})
    sweep = _parsed(content)
    table = sweep.results
    if table and sweep.choose and sweep.choose.by not in table.curves:
        raise ValueError(
            f"`results.curves` must hold the tag of `choose.by`, {sweep.choose.by!r}, but got {table.curves}."
        )
    rows = results_by_run(Path(table.file), ["run", *_FACTS, "options", *table.curves]) if table else {}
    runs: list[Run] = []
    for (method, own), task in itertools.product(sweep.methods.items(), sweep.tasks):
        options = dict(own or {})
        of_method = _parsed(content | {key: options.pop(key) for key in ("grid", "seeds") if key in options})
        runs += _runs_of(str(method), options, str(task), sweep.tasks[task] or {}, of_method, rows)
    if len({run.folder for run in runs}) < len(runs):
        raise ValueError("The runs of a sweep must have folders of their own, but two names or seeds give the same.")
    # Seed by seed, so that a sweep that is cut short has compared all methods on the same seeds.
    order = list(dict.fromkeys(run.seed for run in runs))
    runs.sort(key=lambda run: (not run.choosing, not run.choosing and order.index(run.seed)))
    return runs, sweep


def _parsed(content: Options) -> Sweep:
    keys = [*Sweep.__dataclass_fields__]
    if unknown := [str(key) for key in content if key not in keys]:
        raise ValueError(f"The file of a sweep has the keys {', '.join(keys)}, but got {', '.join(unknown)}.")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Sweep)
    try:
        parser.parse_object(deepcopy(content))  # It makes objects of classes among the options, in their place.
    except ArgumentError as error:
        raise ValueError(f"In the file of a sweep {option_error(error, keys)}") from error
    parts = {"choose": Choose, "results": Results}
    return Sweep(**content | {key: part(**content[key]) for key, part in parts.items() if content.get(key)})


def _runs_of(
    method: str, own: Options, task: str, of_task: Options, sweep: Sweep, rows: Mapping[str, Any]
) -> Iterator[Run]:
    """The runs of a method on a task, with their options, those that choose among them."""
    for name in {*sweep.options, *of_task, *own, *sweep.grid}:
        if _OURS.fullmatch(name):
            raise ValueError(f"`{name}` must not be set in its file: the sweep sets it, or all runs would write there.")
        if name != "config" and sum(name in part for part in (of_task, own, sweep.grid)) > 1:
            raise ValueError(f"`{name}` must be set once, but {method!r}, {task!r} or the grid share it.")
    configs = [part.get("config") or [] for part in ({"config": sweep.config}, sweep.options, of_task, own)]
    files = [name for names in configs for name in ([names] if isinstance(names, str) else names)]
    options = {name: value for name, value in {**sweep.options, **of_task, **own}.items() if name != "config"}
    given = (*(f"--config={name}" for name in files), *(f"--{n}={value_in_words(v)}" for n, v in options.items()))
    points = [dict(zip(sweep.grid, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    chosen_on = sweep.choose.seeds if sweep.choose and len(points) > 1 else []
    if shared := {*sweep.seeds} & {*chosen_on}:
        raise ValueError(f"`choose.seeds` must be other seeds than those of {method!r}, but got {shared} in both.")
    made: list[tuple[Any, int]] = [(None, seed) for seed in sweep.seeds if chosen_on]
    made += itertools.product(points, chosen_on or sweep.seeds)
    for point, seed in made:
        choosing = bool(chosen_on) and point is not None
        name = _file_name(f"{method} {point_in_words(point)}" if point else method, task, str(seed))
        place = Path(f"{sweep.folder}_choosing" if choosing else sweep.folder)
        known: dict[str, Any] = {"method": method, "task": task, "options": given, "row": rows.get(name)}
        yield Run(folder=place / name, seed=seed, point=point, choosing=choosing, **known)


def _file_name(*parts: str) -> str:
    return "__".join(re.sub(r"[^\w.,=+-]+", "_", part) for part in parts)


def _check(runs: Sequence[Run], every: Sequence[Run]) -> int:
    """Parse the options of each method on each task as ``fit`` does; returns the most devices that a run asks for."""
    for run in runs:
        run.check()
    parser, devices, groups = FitOptions(), 1, {run.group for run in runs}
    # Before a point is chosen, those of the grid are parsed in its place.
    points = {(run.group, point_in_words(run.point)): run for run in every if run.point is not None}
    for run in points.values():
        if run.group not in groups:
            continue
        try:
            wanted = parser.parse(run.arguments).trainer.devices
            parser.build()
        except ValueError as error:
            raise ValueError(f"The options of {run.method!r} on {run.task!r}: {error}") from error
        devices = max(devices, int(wanted) if str(wanted).isdigit() else 1)
    return devices


class _Runner:
    """Runs processes of ``fit`` side by side, each with the variables of one of the environments."""

    def __init__(self, environments: Sequence[Mapping[str, str]], sweep: Sweep) -> None:
        self._environments, self._sweep = environments, sweep
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._writing = threading.Lock()

    def stop(self, number: int, frame: object) -> None:
        """Let the runs save after their batch, and start no others: a handler of signals."""
        self._stopped = True
        for process in list(self._processes):
            process.terminate()

    def run(self, runs: Sequence[Run]) -> bool:
        """Run those that are not finished. True if all are then."""
        waiting = iter([run for run in runs if not run.row])

        def work(environment: Mapping[str, str]) -> None:
            for run in waiting:
                self._run(run, environment)

        with ThreadPoolExecutor(len(self._environments)) as pool:
            list(pool.map(work, self._environments))
        return all(run.record()["state"] == "finished" for run in runs)

    def _run(self, run: Run, environment: Mapping[str, str]) -> None:
        """A run that cannot be started or recorded stops no other."""
        try:
            # A run takes its own lock after its imports, when another call would have removed its folder.
            with held(run.folder.with_name(f".{run.folder.name}"), "sweep"):
                if run.record()["state"] != "finished" and not self._stopped:
                    self._attempt(run, environment)
                if run.record()["state"] == "finished":
                    self._add_row(run)
        except (OSError, ValueError) as error:
            print(f"left alone: {run.folder.name}: {error}", flush=True)

    def _attempt(self, run: Run, environment: Mapping[str, str]) -> None:
        """Begin the run, or let it go on from its last checkpoint, and record its state."""
        resumed = (run.folder / "checkpoints" / "last.ckpt").exists()
        if run.record()["state"] != "waiting":
            with held(run.folder):  # That of a sweep that was killed may be at work.
                pass
            if not resumed:
                shutil.rmtree(run.folder)  # Curves of that attempt would mix with those of the next.
        run.folder.mkdir(parents=True, exist_ok=True)
        mark_if_new(run.folder)
        before = run.last_line()
        run.write(state="started")
        command = [sys.executable, "-m", "grail_lightning", "fit", *run.arguments]
        command += ["--ckpt_path=last"] if resumed else []
        # A session of its own: Ctrl-C reaches the sweep alone, which asks its runs to end.
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": os.environ | environment}
        with (run.folder / "fit.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **how)  # noqa: S603  (our own, without a shell)
        self._processes.add(process)
        code = process.wait()
        self._processes.discard(process)
        outcome = run.last_line()
        if code and resumed and _NO_STEP in outcome:  # A sweep was killed between a run's end and its record.
            code, outcome = 0, before
        state = "finished" if code == 0 else "started" if self._stopped else "failed"
        run.write(state=state, outcome=outcome)
        print(f"{state}: {run.folder.name}: {outcome}", flush=True)

    def _add_row(self, run: Run) -> None:
        """Add a finished run to the table. Several sweeps may add to one, and git can merge its lines."""
        if self._sweep.results is None:
            return
        row = {"run": run.folder.name} | {name: getattr(run, name) for name in _FACTS}
        row |= {"options": shlex.join(run.given)} | {tag: run.curve(tag) for tag in self._sweep.results.curves}
        cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
        table = Path(self._sweep.results.file)
        with self._writing:
            table.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame([cells]).to_csv(table, mode="a", header=not table.exists(), index=False)


def _run(runs: Sequence[Run], every: Sequence[Run], choose: Choose | None, runner: _Runner) -> bool:
    """Run those that choose, choose, and run the others at the chosen points. True if all are finished then."""
    if not runner.run([run for run in runs if run.choosing]):
        return False
    best = {}
    for group in {run.group: None for run in runs if run.point is None}:
        assert choose is not None
        best[group] = _best([run for run in every if run.choosing and run.group == group], choose)
        print(f"{', '.join(group)}: {point_in_words(best[group])} is best on the choosing seeds", flush=True)
    reported = [replace(run, point=best.get(run.group, run.point)) for run in runs if not run.choosing]
    for run in reported:
        run.check()  # Another choice, with another grid say, may have begun it at another point.
    return runner.run(reported)


def _best(choosing: Sequence[Run], choose: Choose) -> Mapping[str, Any]:
    """The point with the largest mean figure over the choosing seeds, written to a file beside those runs."""
    figures, points = dict[str, list[float]](), {}
    for run in choosing:
        if run.record()["state"] != "finished":
            raise ValueError(f"The point of {run.method} on {run.task} waits for {run.folder}, which is not finished.")
        values = [*run.curve(choose.by).values()]
        if not values:
            raise ValueError(f"`choose.by` must be the tag of a curve of each run, but {run.folder} has none.")
        name = point_in_words(run.point or {})
        points[name] = run.point or {}
        figure = values[-1] if choose.statistic == "last" else sum(values) / len(values)
        figures.setdefault(name, []).append(figure)
    chosen = pd.Series({name: sum(values) / len(values) for name, values in figures.items()}).idxmax()  # NaN is none.
    one = choosing[0]
    entry = {"method": one.method, "task": one.task, "chosen": chosen, "figures": figures}
    write_whole(one.folder.parent / f"{CHOICE}{_file_name(*one.group)}.json", json.dumps(entry, indent=1) + "\n")
    return points[chosen]


def _selected(runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """The runs of a call: all, the one of an index, or those that match, with the ones that choose for them."""
    selected = [run for k, run in enumerate(runs) if options.index in (None, k)]
    if options.only:
        match = re.compile("|".join(map(fnmatch.translate, options.only))).match
        selected = [run for run in selected if match(run.folder.name) or match(run.method)]
        groups = {run.group for run in selected if run.point is None}
        selected = [run for run in runs if run in selected or (run.choosing and run.group in groups)]
    if not selected:
        raise ValueError(f"There is no such run in {options.file}. --list shows all of them.")
    return selected


def main(arguments: list[str] | None = None) -> None:
    """Run a sweep. A user's mistake is one line, with exit code 2; exit code 1 says that runs are not finished."""
    parser = argparse.ArgumentParser("python -m grail_lightning.sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="the YAML file of the sweep")
    parser.add_argument("--output", type=Path, help="the folder of the runs (default: `folder` of the file)")
    parser.add_argument("--jobs", type=int, help="runs at once (default: one for each core, or for each GPU)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs whose folder or method matches, as 'GRAIL*'")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the commands of the runs, and how far each is")
    what.add_argument("--index", type=int, help="run the run with this number in --list alone, as in a job array")
    options = parser.parse_args(arguments)
    with mistakes_in_one_line():
        every, sweep = read_sweep(options.file, options.output)
        runs = _selected(every, options)
        devices = _check(runs, every)
        if options.list:
            for run in runs:
                chosen = "" if run.point is not None else ", at the point that will be chosen"
                print(f"grail-lightning fit {shlex.join(run.arguments)}  # {run.record()['state']}{chosen}")
            return
        runner = _Runner(environments_of_runs(options.jobs, devices), sweep)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, runner.stop)
        done = _run(runs, every, sweep.choose, runner)
        these = "All runs" if runs == every else f"These runs ({len(runs)} of {len(every)})"
        print(f"{these} are finished." if done else "Not all runs are finished. The same command goes on.")
    raise SystemExit(not done)


if __name__ == "__main__":
    main()

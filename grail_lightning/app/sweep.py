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
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pandas as pd

from grail_lightning.app.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.app.cli.config_files import find_config, read_options
from grail_lightning.app.cli.trainer_options import environments_of_runs
from grail_lightning.app.results.differences import CURVE, curve, read_scalars, results_by_run
from grail_lightning.app.results.runs import CHOICE, point_in_words, value_in_words
from grail_lightning.core.runtime.files import held, write_whole
from grail_lightning.core.runtime.import_path import did_you_mean
from grail_lightning.core.runtime.run_folder import mark_if_new

_KEYS = ("config", "folder", "options", "methods", "tasks", "seeds", "grid", "choose", "results")
_EMPTY: dict[str, Any] = {"methods": {}, "tasks": {}, "options": {}, "grid": {}, "choose": {}, "results": None}
_FOLDERS = r"checkpoint\.dirpath|last_checkpoint\.folder|export\.folder"  # All runs would write there.
_OURS = re.compile(rf"(seed_everything|ckpt_path|trainer\.logger|trainer\.default_root_dir|{_FOLDERS})(\..*)?")
_FACTS = ("run", "method", "task", "seed", "point", "choosing", "options")  # The first columns of a table.
_NO_STEP = "no step is left"  # What `fit` says of a resume after the last step.
_WRITING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class SweepRun:
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
        """Check that the folder, or the row, is that of a run with these options."""
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
        record = {"method": self.method, "task": self.task, "seed": self.seed, "arguments": self.arguments}
        record |= {"point": self.point} if self.point else {}
        record |= {"choosing": True} if self.choosing else {}
        write_whole(self.folder / "sweep.json", json.dumps(record | state, indent=1) + "\n")

    def last_line(self) -> str:
        """What the run has printed last."""
        log = self.folder / "fit.log"
        lines = log.read_text(errors="replace").strip().split("\n") if log.exists() else [""]
        return lines[-1].strip()


def _file_name(*parts: str) -> str:
    return "__".join(re.sub(r"[^\w.,=+-]+", "_", part) for part in parts)


def read_sweep(file: Path, output: Path | None = None) -> tuple[list[SweepRun], dict[str, Any]]:
    """The runs of a YAML file, those that choose first, and its content. `output` replaces its `folder`."""
    content = read_options(find_config(file), "The file of a sweep")
    for key in content.keys() - set(_KEYS):
        hint = did_you_mean(f"`{key}`", [f"`{allowed}`" for allowed in _KEYS]) or f" It has {', '.join(_KEYS)}."
        raise ValueError(f"There is no key `{key}` in the file of a sweep, but {file} has it.{hint}")
    content = _EMPTY | {key: value for key, value in content.items() if value is not None}
    choose, results, groups = content["choose"], content["results"], {k: content[k] for k in ("methods", "tasks")}
    for key, group in groups.items():
        named = isinstance(group, dict) and group and all(isinstance(name, str) for name in group)
        _must(bool(named), f"`{key}` must hold names, which are texts, with their options", group)
    for key, part in [*groups["methods"].items(), *groups["tasks"].items(), ("options", content["options"])]:
        _must(isinstance(part, dict | None), f"`{key}` must hold options with their values", part)
    allowed = isinstance(choose, dict) and choose.keys() <= {"seeds", "by", "statistic"}
    allowed = allowed and choose.get("statistic", "last") in ("last", "mean")
    what = "`choose` must hold `seeds`, a list of integers, and may hold `by`, a tag, and `statistic`, last or mean"
    _must(allowed and (not choose or _are_seeds(choose.get("seeds"))), what, choose)
    if results is not None:
        allowed = isinstance(results, dict) and {"file"} <= results.keys() <= {"file", "curves"}
        what = "`results` must hold `file`, and beside it only `curves`, a list"
        _must(allowed and isinstance(results.get("curves", []), list), what, results)
    folder: Any = output or content.get("folder")
    _must(
        bool(folder) and isinstance(folder, str | Path),
        "`folder` must be the folder of the runs, as `runs/study`",
        folder,
    )
    rows = results_by_run(Path(results["file"]), [*_FACTS, *_curves(content)]) if results else {}
    runs: list[SweepRun] = []
    for method, task in itertools.product(content["methods"], content["tasks"]):
        runs += _runs_of(method, task, content, Path(folder), rows)
    if len({run.folder for run in runs}) < len(runs):
        raise ValueError("The runs of a sweep must have folders of their own, but two names give the same.")
    # Seed by seed, so that a sweep that is cut short has compared all methods on the same seeds.
    order = list(dict.fromkeys(run.seed for run in runs))
    runs.sort(key=lambda run: (not run.choosing, not run.choosing and order.index(run.seed)))
    return runs, content


def _must(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"In the file of a sweep {what}, but got {got!r}.")


def _are_seeds(value: object) -> bool:
    if not isinstance(value, list) or not all(type(seed) is int and seed >= 0 for seed in value):
        return False
    return 0 < len(value) == len(set(value))


def _runs_of(
    method: str, task: str, content: Mapping[str, Any], folder: Path, rows: Mapping[str, Any]
) -> Iterator[SweepRun]:
    """The runs of a method on a task, those that choose among them."""
    common, choose = content["options"], content["choose"]
    method_options, of_task = dict(content["methods"][method] or {}), content["tasks"][task] or {}
    grid, seeds = method_options.pop("grid", content["grid"]), method_options.pop("seeds", content.get("seeds"))
    lists = isinstance(grid, dict) and all(isinstance(values, list) and values for values in grid.values())
    _must(lists, f"`grid` of {method!r} must hold a list of values for each option", grid)
    _must(_are_seeds(seeds), f"`seeds` of {method!r} must be a list of different integers, from 0 on", seeds)
    for name in {*common, *of_task, *method_options, *grid}:
        if _OURS.fullmatch(name):
            raise ValueError(f"`{name}` must not be set in its file: the sweep sets it, or all runs would write there.")
        if name != "config" and sum(name in part for part in (of_task, method_options, grid)) > 1:
            raise ValueError(f"`{name}` must be set once, but {method!r}, {task!r} or the grid share it.")
    configs = [part.get("config") or [] for part in (content, common, of_task, method_options)]
    files = [name for names in configs for name in ([names] if isinstance(names, str) else names)]
    options = {name: value for name, value in {**common, **of_task, **method_options}.items() if name != "config"}
    arguments = (*(f"--config={name}" for name in files), *(f"--{n}={value_in_words(v)}" for n, v in options.items()))
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    choosing = bool(choose) and len(points) > 1
    shared = choosing and {*seeds} & {*choose["seeds"]}
    _must(not shared, f"`choose.seeds` must be other seeds than those of {method!r}", shared)
    combinations: list[tuple[Any, int, bool]] = [(None, seed, False) for seed in seeds if choosing]
    combinations += itertools.product(points, choose["seeds"] if choosing else seeds, [choosing])
    for point, seed, chooses in combinations:
        name = _file_name(f"{method} {point_in_words(point)}" if point else method, task, str(seed))
        place = folder.with_name(f"{folder.name}_choosing") if chooses else folder
        fields: dict[str, Any] = {"method": method, "task": task, "options": arguments, "row": rows.get(name)}
        yield SweepRun(folder=place / name, seed=seed, point=point, choosing=chooses, **fields)


def _curves(content: Mapping[str, Any]) -> list[str]:
    """The tags of the curves in the table of finished runs, among them the one that `choose` needs."""
    by = [content["choose"].get("by", CURVE)]
    return list(dict.fromkeys([*content["results"].get("curves", by), *(by if content["choose"] else [])]))


def _keep(run: SweepRun, content: Mapping[str, Any]) -> None:
    """Add a finished run to the table. Several sweeps may add to one, and git can merge its lines."""
    if not content["results"] or run.row:
        return
    row: dict[str, object] = {"run": run.folder.name, "method": run.method, "task": run.task, "seed": run.seed}
    row |= {"point": run.point, "choosing": run.choosing, "options": shlex.join(run.given)}
    row |= {tag: run.curve(tag) for tag in _curves(content)}
    cells = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    table = Path(content["results"]["file"])
    with _WRITING:
        table.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame([cells]).to_csv(table, mode="a", header=not table.exists(), index=False)


def _check(runs: Sequence[SweepRun], every: Sequence[SweepRun]) -> int:
    """Parse the options of each method on each task as ``fit`` does; returns the most devices that a run asks for.

    Runs whose point is not yet chosen are parsed with the first one of their grid.
    """
    parser, devices = FitOptions(), 1
    first = {run.group: run.point for run in reversed(every) if run.choosing}
    parsed = {}
    for run in runs:
        if run.point is not None:
            run.check()
        candidate = replace(run, point=first[run.group]) if run.point is None else run
        parsed[run.group, point_in_words(candidate.point or {})] = candidate
    for run in parsed.values():
        try:
            wanted = parser.parse(run.arguments).trainer.devices
            parser.build()
        except ValueError as error:
            raise ValueError(f"The options of {run.method!r} on {run.task!r}: {error}") from error
        devices = max(devices, int(wanted) if str(wanted).isdigit() else 1)
    return devices


class _Runner:
    """Runs processes of ``fit`` side by side, each with the variables of one of the environments."""

    def __init__(self, environments: Sequence[Mapping[str, str]], content: Mapping[str, Any]) -> None:
        self._environments: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        for environment in environments:
            self._environments.put(environment)
        self._number, self._content = len(environments), content
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def stop(self, number: int, frame: object) -> None:
        """Let the runs save after their batch, and start no others: a handler of signals."""
        self._stopped.set()
        for process in list(self._processes):
            process.terminate()

    def run(self, runs: Sequence[SweepRun]) -> bool:
        """Run those that are not finished. True if all are then."""
        with ThreadPoolExecutor(self._number) as pool:
            return all(list(pool.map(self._tried, runs)))

    def _tried(self, run: SweepRun) -> bool:
        """A run that cannot be started or recorded stops no other."""
        environment = self._environments.get()
        try:
            if run.record()["state"] == "finished":
                return self._one(run, environment)
            # A run takes its own lock after its imports, when another call would have removed its folder.
            with held(run.folder.with_name(f".{run.folder.name}"), "sweep"):
                return self._one(run, environment)
        except (OSError, ValueError) as error:
            print(f"left alone: {run.folder.name}: {error}", flush=True)
            return False
        finally:
            self._environments.put(environment)

    def _one(self, run: SweepRun, environment: Mapping[str, str]) -> bool:
        if run.record()["state"] == "finished":
            _keep(run, self._content)
            return True
        if self._stopped.is_set():
            return False
        began = (run.folder / "sweep.json").exists()
        if began:
            with held(run.folder):  # If another sweep runs it, its folder must not be removed, nor its state written.
                pass
        resumed = (run.folder / "checkpoints" / "last.ckpt").exists()
        if began and not resumed:
            shutil.rmtree(run.folder)  # Curves of an attempt that left no checkpoint would mix with those of the next.
        run.folder.mkdir(parents=True, exist_ok=True)
        mark_if_new(run.folder)
        before = run.last_line()
        run.write(state="started")
        code = self._fit(run, ["--ckpt_path=last"] if resumed else [], environment)
        outcome = run.last_line()
        if code and resumed and _NO_STEP in outcome:  # A sweep was killed between a run's end and its record.
            code, outcome = 0, before
        state = "finished" if code == 0 else "started" if self._stopped.is_set() else "failed"
        run.write(state=state, outcome=outcome)
        if state == "finished":
            _keep(run, self._content)
        print(f"{state}: {run.folder.name}: {outcome}", flush=True)
        return state == "finished"

    def _fit(self, run: SweepRun, more: Sequence[str], environment: Mapping[str, str]) -> int:
        command = [sys.executable, "-m", "grail_lightning", "fit", *run.arguments, *more]
        # A session of its own: Ctrl-C reaches the sweep alone, which asks its runs to end.
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": os.environ | environment}
        with (run.folder / "fit.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **how)  # noqa: S603  (our own, without a shell)
        self._processes.add(process)
        code = process.wait()
        self._processes.discard(process)
        return code


def _run(runs: Sequence[SweepRun], every: Sequence[SweepRun], choose: Mapping[str, Any], runner: _Runner) -> bool:
    """Run those that choose, choose, and run the others at the chosen points. True if all are finished then."""
    if not runner.run([run for run in runs if run.choosing]):
        return False
    for group in {run.group: None for run in runs if run.point is None}:
        point = _best([run for run in every if run.choosing and run.group == group], choose)
        print(f"{', '.join(group)}: {point_in_words(point)} is best on the choosing seeds", flush=True)
        runs = [replace(run, point=point) if run.group == group and run.point is None else run for run in runs]
    reported = [run for run in runs if not run.choosing]
    for run in reported:
        run.check()  # Another choice, with another grid say, may have begun it at another point.
    return runner.run(reported)


def _best(choosing: Sequence[SweepRun], choose: Mapping[str, Any]) -> Mapping[str, Any]:
    """The point with the largest mean figure over the choosing seeds, written to a file beside those runs."""
    figures, points = dict[str, list[float]](), {}
    for run in choosing:
        if run.record()["state"] != "finished":
            raise ValueError(f"The point of {run.method} on {run.task} waits for {run.folder}, which is not finished.")
        values = [*run.curve(choose.get("by", CURVE)).values()]
        if not values:
            raise ValueError(f"`choose.by` must be the tag of a curve of each run, but {run.folder} has none.")
        name, last = point_in_words(run.point or {}), choose.get("statistic", "last") == "last"
        points[name] = run.point or {}
        figures.setdefault(name, []).append(values[-1] if last else sum(values) / len(values))
    chosen = pd.Series({name: sum(values) / len(values) for name, values in figures.items()}).idxmax()  # NaN is none.
    head = choosing[0]
    entry = {"method": head.method, "task": head.task, "chosen": chosen, "figures": figures}
    write_whole(head.folder.parent / f"{CHOICE}{_file_name(*head.group)}.json", json.dumps(entry, indent=1) + "\n")
    return points[chosen]


def _selected(runs: Sequence[SweepRun], options: argparse.Namespace) -> list[SweepRun]:
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
        every, content = read_sweep(options.file, options.output)
        runs = _selected(every, options)
        devices = _check(runs, every)
        if options.list:
            for run in runs:
                chosen = "" if run.point is not None else ", at the point that will be chosen"
                print(f"grail-lightning fit {shlex.join(run.arguments)}  # {run.record()['state']}{chosen}")
            return
        runner = _Runner(environments_of_runs(options.jobs, devices), content)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, runner.stop)
        done = _run(runs, every, content["choose"], runner)
        these = "All runs" if runs == every else f"These runs ({len(runs)} of {len(every)})"
        print(f"{these} are finished." if done else "Not all runs are finished. The same command goes on.")
    raise SystemExit(not done)

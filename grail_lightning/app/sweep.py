"""``python -m grail_lightning.sweep FILE``: methods × tasks × seeds, each a `grail-lightning fit` in its own folder.

Called again, it goes on: finished runs are skipped, others resume from their last checkpoint. The page
"Evaluate and compare" has the format of the file. `choice` builds on this module and chooses points of a grid;
scripts/study.py keeps a table, too.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from grail_lightning.app.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.app.cli.config_files import find_config, read_options
from grail_lightning.app.cli.trainer_options import environments_of_runs
from grail_lightning.app.results.runs import point_in_words, value_in_words
from grail_lightning.core.runtime.files import held, write_whole
from grail_lightning.core.runtime.import_path import did_you_mean
from grail_lightning.core.runtime.run_folder import mark_if_new

KEYS = ("config", "folder", "options", "methods", "tasks", "seeds", "grid")
"""The keys of the file of a sweep."""

_EMPTY: dict[str, Any] = {"methods": {}, "tasks": {}, "options": {}, "grid": {}}
_FOLDERS = r"checkpoint\.dirpath|last_checkpoint\.folder|export\.folder"  # All runs would write there.
_OURS = re.compile(rf"(seed_everything|ckpt_path|trainer\.logger|trainer\.default_root_dir|{_FOLDERS})(\..*)?")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals at which the runs of a sweep save and end."""
_NO_STEP = "no step is left"  # What `fit` says of a resume after the last step.


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep. `options` are without those of the grid, of which the run has the values in `point`."""

    folder: Path
    method: str
    task: str
    seed: int
    options: tuple[str, ...]
    point: Mapping[str, Any]

    @property
    def given(self) -> list[str]:
        """The options that the file gives, those of the point last."""
        return [*self.options, *(f"--{name}={value_in_words(value)}" for name, value in self.point.items())]

    @property
    def arguments(self) -> list[str]:
        """The arguments of ``fit``."""
        place = {"save_dir": str(self.folder.parent), "name": self.folder.name, "version": ""}
        logger = json.dumps({"class_path": "TensorBoardLogger", "init_args": place})
        ours = (f"--seed_everything={self.seed}", f"--trainer.logger={logger}", "--trainer.enable_progress_bar=false")
        return [*self.given, *ours]

    def check(self) -> None:
        """Check that the folder is that of a run with these options."""
        if self.record().get("arguments", self.arguments) != self.arguments:
            raise ValueError(
                f"{self.folder} must hold a run with these options, but there is one with others. Give the sweep "
                "another folder (`--output`), or remove that run."
            )

    def record(self) -> dict[str, Any]:
        """What is known of the run; `state` is waiting, started, failed or finished."""
        file = self.folder / "sweep.json"
        return dict(json.loads(file.read_text())) if file.is_file() else {"state": "waiting"}

    def write(self, **state: object) -> None:
        """Record the state of the run."""
        record = {"method": self.method, "task": self.task, "seed": self.seed, "arguments": self.arguments}
        record |= {"point": self.point} if self.point else {}
        write_whole(self.folder / "sweep.json", json.dumps(record | state, indent=1) + "\n")

    def last_line(self) -> str:
        """What the run has printed last."""
        log = self.folder / "fit.log"
        lines = log.read_text(errors="replace").strip().split("\n") if log.exists() else [""]
        return lines[-1].strip()


Run = TypeVar("Run", bound=SweepRun)


def file_name(*parts: str) -> str:
    """The name of a file or folder for a method, a task, and more."""
    return "__".join(re.sub(r"[^\w.,=+-]+", "_", part) for part in parts)


def read_sweep(file: Path, output: Path | None = None) -> list[SweepRun]:
    """The runs of a YAML file. `output` replaces its `folder`."""
    return runs_of(read_file(file), output)


def read_file(file: Path, keys: Sequence[str] = KEYS) -> dict[str, Any]:
    """The content of the YAML file of a sweep, which must have no other keys than these."""
    content = read_options(find_config(file), "The file of a sweep")
    for key in content.keys() - set(keys):
        hint = did_you_mean(f"`{key}`", [f"`{allowed}`" for allowed in keys]) or f" It has {', '.join(keys)}."
        if key in ("choose", "results"):
            hint = f" Run: python scripts/study.py {file}"
        raise ValueError(f"There is no key `{key}` in the file of a sweep, but {file} has it.{hint}")
    return {key: value for key, value in content.items() if value is not None}


def runs_of(content: Mapping[str, Any], output: Path | None = None) -> list[SweepRun]:
    """The runs of the content of such a file; other keys than `KEYS` are not looked at."""
    content = _EMPTY | dict(content)
    groups = {key: content[key] for key in ("methods", "tasks")}
    for key, group in groups.items():
        named = isinstance(group, dict) and group and all(isinstance(name, str) for name in group)
        must(bool(named), f"`{key}` must hold names, which are texts, with their options", group)
    for key, part in [*groups["methods"].items(), *groups["tasks"].items(), ("options", content["options"])]:
        must(isinstance(part, dict | None), f"`{key}` must hold options with their values", part)
    folder: Any = output or content.get("folder")
    what = "`folder` must be the folder of the runs, as `runs/study`"
    must(bool(folder) and isinstance(folder, str | Path), what, folder)
    runs: list[SweepRun] = []
    for method, task in itertools.product(content["methods"], content["tasks"]):
        runs += _runs_of(method, task, content, Path(folder))
    if len({run.folder for run in runs}) < len(runs):
        raise ValueError("The runs of a sweep must have folders of their own, but two names give the same.")
    # Seed by seed, so that a sweep that is cut short has compared all methods on the same seeds.
    order = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: order.index(run.seed))


def must(holds: bool, what: str, got: object) -> None:
    """Raise a ValueError that says what the file of a sweep must hold, unless it does."""
    if not holds:
        raise ValueError(f"In the file of a sweep {what}, but got {got!r}.")


def are_seeds(value: object) -> bool:
    """Whether a value is a list of different integers, from 0 on."""
    if not isinstance(value, list) or not all(type(seed) is int and seed >= 0 for seed in value):
        return False
    return 0 < len(value) == len(set(value))


def _runs_of(method: str, task: str, content: Mapping[str, Any], folder: Path) -> Iterator[SweepRun]:
    """The runs of a method on a task."""
    common = content["options"]
    method_options, of_task = dict(content["methods"][method] or {}), content["tasks"][task] or {}
    grid, seeds = method_options.pop("grid", content["grid"]), method_options.pop("seeds", content.get("seeds"))
    lists = isinstance(grid, dict) and all(isinstance(values, list) and values for values in grid.values())
    must(lists, f"`grid` of {method!r} must hold a list of values for each option", grid)
    must(are_seeds(seeds), f"`seeds` of {method!r} must be a list of different integers, from 0 on", seeds)
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
    for point, seed in itertools.product(points, seeds):
        name = file_name(f"{method} {point_in_words(point)}" if point else method, task, str(seed))
        fields: dict[str, Any] = {"method": method, "task": task, "options": arguments, "point": point}
        yield SweepRun(folder=folder / name, seed=seed, **fields)


def check_options(runs: Sequence[SweepRun]) -> int:
    """Parse the options of each method on each task as ``fit`` does; returns the most devices that a run asks for."""
    parser, devices = FitOptions(), 1
    for run in {(run.method, run.task, point_in_words(run.point)): run for run in runs}.values():
        try:
            wanted = parser.parse(run.arguments).trainer.devices
            parser.build()
        except ValueError as error:
            raise ValueError(f"The options of {run.method!r} on {run.task!r}: {error}") from error
        devices = max(devices, int(wanted) if str(wanted).isdigit() else 1)
    return devices


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


class Runner:
    """Runs processes of ``fit`` side by side, each with the variables of one of the environments.

    `when_finished` is called with each run that has finished, also with one that had before; `say` with a line for
    each that has ended or could not be started.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        when_finished: Callable[[Any], None] = lambda run: None,
        say: Callable[[str], None] = say,
    ) -> None:
        self._environments: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        for environment in environments:
            self._environments.put(environment)
        self._number, self._when_finished, self._say = len(environments), when_finished, say
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the runs."""
        return self._stopped.is_set()

    def stop_at_signals(self) -> None:
        """Let Ctrl-C and SIGTERM stop the runs."""
        for number in STOPPING:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        """Let the runs save after their batch, and start no others."""
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
            self._say(f"left alone: {run.folder.name}: {error}")
            return False
        finally:
            self._environments.put(environment)

    def _one(self, run: SweepRun, environment: Mapping[str, str]) -> bool:
        if run.record()["state"] == "finished":
            self._when_finished(run)
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
            self._when_finished(run)
        self._say(f"{state}: {run.folder.name}: {outcome}")
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


def selected(runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """The runs of a call: all, the one of an index, or those that match."""
    chosen = [run for k, run in enumerate(runs) if options.index in (None, k)]
    if options.only:
        match = re.compile("|".join(map(fnmatch.translate, options.only))).match
        chosen = [run for run in chosen if match(run.folder.name) or match(run.method)]
    if not chosen:
        raise ValueError(f"There is no such run in {options.file}. --list shows all of them.")
    return chosen


def parse_call(program: str, description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What a user asks of a program that runs the file of a sweep."""
    parser = argparse.ArgumentParser(program, description=description, allow_abbrev=False)
    parser.add_argument("file", type=Path, help="the YAML file of the sweep")
    parser.add_argument("--output", type=Path, help="the folder of the runs (default: `folder` of the file)")
    parser.add_argument("--jobs", type=int, help="runs at once (default: one for each core, or for each GPU)")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs whose folder or method matches, as 'GRAIL*'")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the commands of the runs, and how far each is")
    what.add_argument("--index", type=int, help="run the run with this number in --list alone, as in a job array")
    return parser.parse_args(arguments)


def line_of(run: SweepRun) -> str:
    """The command of a run, and how far it is."""
    return f"grail-lightning fit {shlex.join(run.arguments)}  # {run.record()['state']}"


def last_words(done: bool, number: int, of: int) -> str:
    """What a call ends with that had that number of the runs to finish."""
    these = "All runs" if number == of else f"These runs ({number} of {of})"
    return f"{these} are finished." if done else "Not all runs are finished. The same command goes on."


def main(arguments: list[str] | None = None) -> None:
    """Run a sweep. A user's mistake is one line, with exit code 2; exit code 1 says that runs are not finished."""
    options = parse_call("python -m grail_lightning.sweep", __doc__, arguments)
    with mistakes_in_one_line():
        every = read_sweep(options.file, options.output)
        runs = selected(every, options)
        for run in runs:
            run.check()
        devices = check_options(runs)
        if options.list:
            print("\n".join(map(line_of, runs)))
            return
        runner = Runner(environments_of_runs(options.jobs, devices))
        runner.stop_at_signals()
        done = runner.run(runs)
        print(last_words(done, len(runs), len(every)))
    raise SystemExit(not done)

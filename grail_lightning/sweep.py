"""``python -m grail_lightning.sweep FILE``: methods × tasks × seeds, each a `grail-lightning fit` in its own folder.

Called again, it goes on: finished runs are skipped, others resume from their last checkpoint. With `choose`, each
method first runs its grid on seeds of its own, and reports the other seeds at the best point. docs/sweeps.md has the
format of the file.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from grail_lightning.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.evaluate.compare import CURVE
from grail_lightning.evaluate.runs import CHOICE
from grail_lightning.runtime.files import LOCK, held, write_whole
from grail_lightning.runtime.run_folder import mark_if_new
from grail_lightning.sweep_file import Run, described, read_sweep, safe

_NO_STEP = "no step is left"  # What `fit` says of a resume after the last step.


def _check(runs: Sequence[Run], every: Sequence[Run], file: Path) -> int:
    """Parse the options of each method on each task as ``fit`` does; returns the most devices that a run asks for.

    Runs whose point is not yet chosen are parsed with the first one of their grid.
    """
    parser, devices, seen = FitOptions(), 1, set()
    first = {run.group: run.point for run in reversed(every) if run.choosing}
    for run in runs:
        if run.row and run.point is not None and run.row["options"] != shlex.join(run.given):
            raise ValueError(
                f"The row of {run.folder.name} must be of a run with the options of {file}, but it has others. Name "
                "another table in `results.file`, or remove the row."
            )
        if run.point is not None and run.record().get("arguments", run.arguments) != run.arguments:
            raise ValueError(
                f"{run.folder} must hold a run with the options of {file}, but there is one with others. Give the "
                "sweep another folder (`--output`), or remove that run."
            )
        known = replace(run, point=first[run.group]) if run.point is None else run
        if (key := (run.group, described(known.point or {}))) not in seen:
            seen.add(key)
            try:
                wanted = parser.parse(known.arguments).trainer.devices
                parser.build()
            except ValueError as error:
                raise ValueError(f"The options of {run.method!r} on {run.task!r} in {file}: {error}") from error
            devices = max(devices, int(wanted) if str(wanted).isdigit() else 1)
    return devices


def _best(choosing: Sequence[Run], choose: Mapping[str, Any]) -> Mapping[str, Any]:
    """The point with the largest mean figure over the choosing seeds, written to a file beside those runs."""
    figures, points = dict[str, list[float]](), {}
    for run in choosing:
        if run.record()["state"] != "finished":
            raise ValueError(f"The point of {run.method} on {run.task} waits for {run.folder}, which is not finished.")
        values = list(run.curve(choose.get("by", CURVE)).values())
        if not values:
            raise ValueError(f"`choose.by` must be the tag of a curve of each run, but {run.folder} has none.")
        name, last = described(run.point or {}), choose.get("statistic", "last") == "last"
        points[name] = run.point or {}
        figures.setdefault(name, []).append(values[-1] if last else sum(values) / len(values))
    chosen = max(figures, key=lambda name: sum(figures[name]) / len(figures[name]))
    one = choosing[0]
    entry = {"method": one.method, "task": one.task, "chosen": chosen, "figures": figures}
    write_whole(one.folder.parent / f"{CHOICE}{safe(*one.group)}.json", json.dumps(entry, indent=1) + "\n")
    return points[chosen]


# --- running ----------------------------------------------------------------------------------------------------------


class _Runner:
    """Runs processes of ``fit`` side by side, each with the variables of one of the environments."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._environments: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        for environment in environments:
            self._environments.put(environment)
        self._number = len(environments)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def stop(self, number: int, frame: object) -> None:
        """Let the runs save after their batch, and start no others: a handler of signals."""
        self._stopped.set()
        for process in list(self._processes):
            process.terminate()

    def run(self, runs: Sequence[Run]) -> bool:
        """Run those that are not finished. True if all are then."""
        with ThreadPoolExecutor(self._number) as pool:
            return all(list(pool.map(self._one, runs)))

    def _one(self, run: Run) -> bool:
        if run.record()["state"] == "finished":
            run.keep()
            return True
        if self._stopped.is_set():
            return False
        if (run.folder / "sweep.json").exists():
            try:
                with held(run.folder):
                    pass
            except ValueError:  # Another sweep runs it: its folder must not be removed, nor its state written.
                print(f"left alone: {run.folder.name}: in use by {(run.folder / LOCK).read_text()}", flush=True)
                return False
        resumed = ["--ckpt_path=last"] if (run.folder / "checkpoints" / "last.ckpt").exists() else []
        if not resumed and (run.folder / "sweep.json").exists():
            shutil.rmtree(run.folder)  # Curves of an attempt that left no checkpoint would mix with those of the next.
        run.folder.mkdir(parents=True, exist_ok=True)
        mark_if_new(run.folder)
        before = run.last_line()
        run.write(state="started")
        code = self._fit([*run.arguments, *resumed], run.folder / "fit.log")
        outcome = run.last_line()
        if code and resumed and _NO_STEP in outcome:  # A sweep was killed between a run's end and its record.
            code, outcome = 0, before
        state = "finished" if code == 0 else "started" if self._stopped.is_set() else "failed"
        run.write(state=state, outcome=outcome)
        if state == "finished":
            run.keep()
        print(f"{state}: {run.folder.name}: {outcome}", flush=True)
        return state == "finished"

    def _fit(self, arguments: Sequence[str], log_file: Path) -> int:
        environment = self._environments.get()
        command = [sys.executable, "-m", "grail_lightning", "fit", *arguments]
        with log_file.open("ab") as log:
            # A session of its own: Ctrl-C reaches the sweep alone, which asks its runs to end.
            settings: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(  # noqa: S603  (our own command, without a shell)
                command, **settings, env={**os.environ, **environment}, start_new_session=True
            )
            self._processes.add(process)
            code = process.wait()
        self._processes.discard(process)
        self._environments.put(environment)
        return code


def _environments(jobs: int | None, devices: int) -> list[dict[str, str]]:
    """The environment of each run at a time: its GPUs, or its threads on the CPU."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"`--jobs` must be at least 1, but got {jobs}.")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if gpus != [""]:
        if devices > len(gpus):
            raise ValueError(
                f"`trainer.devices` of a run must be at most the number of GPUs, {len(gpus)}, but got {devices}. Ask "
                "for fewer, or set CUDA_VISIBLE_DEVICES, which is empty for runs on the CPU."
            )
        parts = [gpus[start : start + devices] for start in range(0, len(gpus) - devices + 1, devices)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts][:jobs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = jobs or max(1, cores // devices)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // number // devices))}
    return [threads] * number


# --- the command ------------------------------------------------------------------------------------------------------


def _selected(runs: Sequence[Run], asked: argparse.Namespace) -> list[Run]:
    """The runs of a call: all, the one of an index, or those that match, with the ones that choose for them."""
    selected = list(runs if asked.index is None else runs[asked.index : asked.index + 1])
    if asked.only:
        match = re.compile("|".join(map(fnmatch.translate, asked.only))).match
        selected = [run for run in selected if match(run.folder.name) or match(run.method)]
        groups = {run.group for run in selected if run.point is None}
        selected = [run for run in runs if run in selected or (run.choosing and run.group in groups)]
    if not selected:
        raise ValueError(f"There is no such run in {asked.file}. --list shows all of them.")
    return selected


def _run(runs: Sequence[Run], every: Sequence[Run], choose: Mapping[str, Any], runner: _Runner) -> bool:
    """Run those that choose, choose, and run the others at the chosen points. True if all are finished then."""
    if not runner.run([run for run in runs if run.choosing]):
        return False
    for group in {run.group: None for run in runs if run.point is None}:
        point = _best([run for run in every if run.choosing and run.group == group], choose)
        print(f"{', '.join(group)}: {described(point)} is best on the choosing seeds", flush=True)
        runs = [replace(run, point=point) if run.group == group and run.point is None else run for run in runs]
    return runner.run([run for run in runs if not run.choosing])


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
    asked = parser.parse_args(arguments)
    with mistakes_in_one_line():
        every, choose = read_sweep(asked.file, asked.output)
        runs = _selected(every, asked)
        devices = _check(runs, every, asked.file)
        if asked.list:
            for run in runs:
                chosen = "" if run.point is not None else ", at the point that will be chosen"
                print(f"grail-lightning fit {shlex.join(run.arguments)}  # {run.record()['state']}{chosen}")
            return
        runner = _Runner(_environments(asked.jobs, devices))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, runner.stop)
        done = _run(runs, every, choose, runner)
        print("All runs are finished." if done else "Not all runs are finished. The same command goes on.")
    raise SystemExit(not done)


if __name__ == "__main__":
    main()

"""Jobs of the benchmark in processes of their own, several at once, whose outcomes are kept in files."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from grail_lightning.core.runtime.files import write_whole

Report = Callable[[float], None]
"""Tells what share of a job is done, from 0 to 1."""


class Bar(Protocol):
    """What is used of a bar of progress."""

    def update(self, n: float) -> object:
        """Move the bar by as many units."""

    def set_postfix_str(self, s: str, refresh: bool) -> object:
        """Show words behind the bar."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures, and the file that keeps the outcome."""

    name: str  # For the bar of progress.
    measure: Callable[..., dict[str, Any]]  # A function of a module; it gets the arguments, and `report: Report`.
    arguments: dict[str, Any]
    units: float  # About the seconds that it takes.
    file: Path

    def kept(self) -> dict[str, Any] | None:
        """The outcome that is kept; None if there is none."""
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else None


def run_jobs(jobs: Sequence[Job], processes: int, bar: Bar, *, reuse: bool = False) -> list[dict[str, Any]]:
    """The outcomes of all jobs, which begin in their order; those that are kept are not measured again.

    An error of a job is raised when it happens, and ends the others at once, as Ctrl-C does; outcomes of jobs that are
    finished are kept. Each job has a process of its own; with `reuse` a process takes one job after another, which
    saves its imports, for methods that leave nothing behind in their classes and modules.

    Raises:
        ValueError: What a job raised, in one line; the traceback of another error than a `ValueError` is printed. And
            if a process was killed, for instance for lack of memory.
    """
    outcomes = [job.kept() for job in jobs]
    for job, outcome in zip(jobs, outcomes, strict=True):
        bar.update(job.units if outcome is not None else 0)
    missing = [k for k, outcome in enumerate(outcomes) if outcome is None]
    busy: dict[Connection, tuple[BaseProcess, int]] = {}  # By its connection, a process and its job.
    idle: list[tuple[Connection, BaseProcess]] = []
    shares = [0.0] * len(jobs)
    try:
        while missing or busy:
            while missing and len(busy) < processes:
                connection, process = idle.pop() if idle else _start()
                busy[connection] = process, missing.pop(0)
                with suppress(OSError):  # A process that has died is found below.
                    connection.send(jobs[busy[connection][1]])
            ready = {*wait([*busy], timeout=1.0)}
            for connection, (process, k) in [entry for entry in busy.items() if entry[0] in ready]:
                try:
                    share, outcome, mistake = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    mistake = _death(process)
                if mistake:
                    raise ValueError(f"{jobs[k].name}: {mistake}")
                bar.update((share - shares[k]) * jobs[k].units)
                shares[k] = share
                if outcome is not None:
                    outcomes[k] = outcome
                    busy.pop(connection)
                    if reuse:
                        idle.append((connection, process))
                    else:
                        process.terminate()
            bar.set_postfix_str(", ".join(jobs[k].name for _, k in busy.values()), refresh=False)
            bar.update(0)
    finally:
        for process in [process for process, _ in busy.values()] + [process for _, process in idle]:
            process.terminate()
    return [outcome for outcome in outcomes if outcome is not None]


def _start() -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")  # The child of a process with threads may hang.
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there,), daemon=True)
    process.start()
    there.close()  # The end of the process is then the end of what can be read.
    return here, process


def _work(connection: Connection) -> None:
    """Measure one job after another, until this process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the one that waits, which ends this process.
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()
    while True:
        _measure(connection.recv(), connection)


def _measure(job: Job, connection: Connection) -> None:
    """Measure, and send shares, and at last the outcome or the mistake."""
    try:
        outcome = job.measure(**job.arguments, report=lambda share: connection.send((min(share, 1.0), None, "")))
        write_whole(job.file, json.dumps(outcome))
        connection.send((1.0, outcome, ""))
    except ValueError as error:
        connection.send((1.0, None, str(error)))
    except Exception as error:  # Any error of the method is the user's to see.
        traceback.print_exc()
        connection.send((1.0, None, f"{type(error).__name__}: {error}. The traceback is above."))


def _death(process: BaseProcess) -> str:
    code = process.exitcode
    if code == -signal.SIGKILL:
        return "the process was killed, most likely for lack of memory. Give fewer --batches, or --jobs 1."
    return f"the process ended with code {code}. What it printed is above."

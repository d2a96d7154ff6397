"""Runs the runs of a sweep side by side, until all have ended or the sweep is asked to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from grail_lightning.sweep.choose import choose, told
from grail_lightning.sweep.grid import Run, Study
from grail_lightning.sweep.jobs import Job
from grail_lightning.sweep.machine import Slots
from grail_lightning.sweep.plan import Planned, RunPlanner
from grail_lightning.sweep.progress import Progress
from grail_lightning.sweep.records import Claim, Record, read_record

POLL_SECONDS, LOOK_SECONDS = 0.2, 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Outcome:
    """How the runs of a call have ended.

    Attributes:
        finished: The runs that are finished, those of earlier calls included.
        failed: Those that failed in this call, with their records.
        left: Those that did not end: interrupted, or not begun.
        stopped: The signal that ended the sweep; None without one.
    """

    finished: list[Run] = field(default_factory=list)
    failed: list[tuple[Run, Record]] = field(default_factory=list)
    left: list[Run] = field(default_factory=list)
    stopped: signal.Signals | None = None


class Runner:
    """Starts runs in the free places of the machine. Runs that another process has are waited for.

    Args:
        study: The sweep.
        planner: Plans runs whose point has just been chosen.
        places: The places of the machine.
        say: Prints a line.
    """

    def __init__(self, study: Study, planner: RunPlanner, places: Slots, say: Callable[[str], None]) -> None:
        self.study, self.planner, self.places = study, planner, places
        self._progress = Progress(len(places.environments), say)
        self._outcome = Outcome()
        self._waiting: list[Planned] = []
        self._jobs: dict[int, Job] = {}
        self._attempts: dict[Path, int] = {}  # Before this call.
        self._busy: set[Path] = set()
        self._heard: list[signal.Signals] = []

    def run(self, plans: Sequence[Planned]) -> Outcome:
        """Run these, and return how they have ended."""
        records = [(plan, read_record(plan.run)) for plan in plans]
        done = [(plan.run, record) for plan, record in records if record.state == "finished"]
        self._attempts = {plan.run.folder: record.attempts for plan, record in records}
        self._waiting = [plan for plan, record in records if record.state != "finished"]
        self._outcome.finished = [run for run, _ in done]
        self._progress.begin(done, len(self._waiting))
        with self._listening():
            try:
                self._until_ended()
            finally:
                self._end_all()
        self._outcome.left += [plan.run for plan in self._waiting]
        return self._outcome

    def _until_ended(self) -> None:
        look_at = 0.0
        while self._jobs or (self._waiting and not self._outcome.stopped):
            self._obey()
            ended = [self._end(place, job) for place, job in list(self._jobs.items())]
            if not self._outcome.stopped and (any(ended) or time.monotonic() >= look_at):
                self._decide()
                self._waiting = [plan for plan in self._waiting if not self._settled(plan)]
                look_at = time.monotonic() + LOOK_SECONDS
            if self._jobs or self._waiting:
                time.sleep(POLL_SECONDS)

    # --- starting -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Choose the points for which the runs that choose are finished."""
        choice = self.study.choice
        groups = {plan.run.group for plan in self._waiting if plan.run.point is None}
        if choice is None or not groups:
            return
        unfinished = {run.group for run in self.study.runs if run.choosing and read_record(run).state != "finished"}
        ended = [*(run for run, _ in self._outcome.failed), *self._outcome.left]
        given_up = {run.group for run in ended if run.choosing}
        for group in groups - unfinished:
            try:
                point = choose(self.study, choice, group)
                planned = self.planner.plan(
                    [replace(p.run, point=point) for p in self._waiting if p.run.group == group]
                )
            except ValueError as error:
                self._progress.note(f"{', '.join(group)}: {error}")
                given_up.add(group)
            else:
                self._progress.note(told(point, group, self.study))
                at = {plan.run.folder: plan for plan in planned}
                self._waiting = [at.get(plan.run.folder, plan) for plan in self._waiting]
        for group in sorted(groups & {run.group for run, _ in self._outcome.failed if run.choosing}):
            self._progress.note(
                f"{', '.join(group)}: no point can be chosen, since a run that chooses has failed. The same command "
                "tries it again; or take its values out of the grid"
            )
        self._outcome.left += [p.run for p in self._waiting if p.run.point is None and p.run.group in given_up]
        self._waiting = [p for p in self._waiting if p.run.point is not None or p.run.group not in given_up]

    def _settled(self, plan: Planned) -> bool:
        """Start a run if there is a place. True if it has been started, or has ended in another call."""
        run = plan.run
        free = [place for place in range(len(self.places.environments)) if place not in self._jobs]
        if not free or run.point is None:
            return False
        try:
            claim = Claim(run)
        except ValueError:
            return self._is_busy(run)
        record = read_record(run)
        elsewhere = record.attempts > self._attempts[run.folder]
        if record.state == "finished" or (record.state == "failed" and elsewhere):
            claim.release()
            self._file(run, record)
            self._progress.elsewhere(run, record)
            return True
        try:
            job = Job(plan, claim, self.places.environments[free[0]])
        except ValueError:
            claim.release()
            return self._is_busy(run)
        except BaseException:
            claim.release()
            raise
        self._jobs[free[0]] = job
        self._progress.started(run, job.record)
        return True

    def _is_busy(self, run: Run) -> bool:
        """Another process has the run: say so once, and look again later."""
        if run.folder not in self._busy:
            self._busy.add(run.folder)
            self._progress.note(f"{run.title}: another process is at it; waiting for it")
        return False

    # --- ending -------------------------------------------------------------------------------------------------------

    def _end(self, place: int, job: Job) -> bool:
        """Take note of a run if it has come to its end."""
        record = job.ended()
        if record is None:
            return False
        del self._jobs[place]
        self._file(job.run, record)
        groups = [plan.run.group for plan in self._waiting]
        running = [(other.run.group, other.seconds) for other in self._jobs.values()]
        self._progress.ended(job.run, record, self._progress.left(groups, running))
        return True

    def _file(self, run: Run, record: Record) -> None:
        if record.state == "finished":
            self._outcome.finished.append(run)
        elif record.state == "failed":
            self._outcome.failed.append((run, record))
        else:
            self._outcome.left.append(run)

    def _end_all(self) -> None:
        """End the runs that an error of the sweep itself has left."""
        for job in self._jobs.values():
            job.interrupt()
        while self._jobs:
            for place, job in list(self._jobs.items()):
                self._end(place, job)
            time.sleep(POLL_SECONDS)

    def _obey(self) -> None:
        """Let signals end the runs: the first one after their batch, a further one at once."""
        heard, self._heard = self._heard, []
        for number in heard:
            first = self._outcome.stopped is None
            self._outcome.stopped = self._outcome.stopped or number
            for job in self._jobs.values():
                job.interrupt() if first else job.kill()
            if first and self._jobs:
                self._progress.note(f"{number.name}: runs save and end after their batch; a second one ends them now")

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Take note of signals, which `_obey` acts upon: a handler may interrupt a line that is being printed."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        heard = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

        def receive(number: int, frame: FrameType | None) -> None:
            self._heard.append(signal.Signals(number))

        for number in heard:
            signal.signal(number, receive)
        try:
            yield
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)

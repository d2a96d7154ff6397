"""Runs programs of a policy on their tests, many at a time, where they can do no harm."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from grail_lightning.worlds.programs.grade import grade, line_of, printed
from grail_lightning.worlds.programs.guest import encode
from grail_lightning.worlds.programs.isolation import Isolation
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, ProgramOutcome, Tests
from grail_lightning.worlds.programs.probe import choose
from grail_lightning.worlds.programs.sandbox import LostError, Sandbox, StartError

_MAX_CHARACTERS = 1 << 17
_ATTEMPTS = 20
_LARGEST = 1 << 20
_MOST_KEPT = 50_000  # Outcomes: some 50 MB. Neither those with traces are kept, nor those that are not certain.

Result = TypeVar("Result")


class Executor:
    """Runs programs in sandboxes, and keeps their outcomes by the program's text and its tests.

    Args:
        isolation: `Bubblewrap()`, `Sandlock()`, `Server(url)`, or one of your own. None takes the first of `Bubblewrap`
            and `Sandlock` that isolates on this machine, which a program that tries to get out finds out.
        limits: Of one program with all of its tests.
        workers: How many programs run at a time.

    Raises:
        RuntimeError: Nothing isolates programs on this machine. They are never run without.
    """

    def __init__(
        self,
        isolation: Isolation | None = None,
        limits: ProgramLimits = ProgramLimits(),  # noqa: B008  (frozen)
        workers: int = 2,
    ) -> None:
        if not all(0 < x <= _LARGEST for x in (limits.seconds, limits.memory_mb, limits.output_kb, workers)):
            text = f"`limits` and `workers` must be positive and at most {_LARGEST:,}, but got {limits} and {workers}."
            raise ValueError(text)
        self.isolation = choose(isolation)
        self.limits = limits
        self.workers = workers
        self._kept: dict[bytes, ProgramOutcome] = {}
        self._forget()

    def __reduce__(self) -> tuple[object, ...]:
        return Executor, (self.isolation, self.limits, self.workers)

    def run(self, program: str, tests: Tests, *, trace: int | None = None) -> ProgramOutcome:
        """What becomes of a program on its tests, or, with its trace, on the test ``trace`` alone."""
        return self.run_many([Job(program, tests, trace)])[0]

    def run_many(self, jobs: Sequence[Job]) -> list[ProgramOutcome]:
        """The outcome of each job, in their order; equal jobs run once. TypeError if tests hold what is no literal."""
        keys = [_key(job) for job in jobs]
        outcomes = {key: outcome for key in keys if (outcome := self._kept.get(key)) is not None}
        fresh = {key: job for key, job in zip(keys, jobs, strict=True) if key not in outcomes}
        outcomes |= dict(zip(fresh, self._threads_here().map(self._run, fresh.values()), strict=True))
        with self._lock:
            self._kept |= {key: outcomes[key] for key in fresh if outcomes[key].trace is None and outcomes[key].certain}
            while len(self._kept) > _MOST_KEPT:  # the newest stay
                del self._kept[next(iter(self._kept))]
        return [outcomes[key] for key in keys]

    def printed(self, program: str, queued: Callable[[], object] = lambda: None) -> str:
        """What a program without tests prints, and the end of its traceback; nothing of it is kept.

        While it has to wait for others `queued` is called ten times a second.
        """
        future = self._threads_here().submit(self._attempt, lambda solver, _: printed(solver, program))
        try:
            while not wait([future], timeout=0.1).done:  # Between two waits a thread that was abandoned ends.
                if not future.running():
                    queued()
            return future.result()
        finally:
            future.cancel()  # A program that nobody waits for must not run before those of others.

    def close(self) -> None:
        """End all processes. The next program would start new ones."""
        self._finalizer()
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._sandboxes: list[Sandbox] = []
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="programs")
        self._finalizer = weakref.finalize(self, _end, self._threads, self._sandboxes, self._pid)

    def _threads_here(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # we are a fork: threads and sandboxes are our parent's
            self._forget()
        return self._threads

    def _run(self, job: Job) -> ProgramOutcome:
        """In a thread of ours."""
        passed = (False,) * (len(job.tests) if job.trace is None else 1)
        if len(job.program) > _MAX_CHARACTERS:
            return ProgramOutcome("refused", passed, 0, None, f"a program of {len(job.program)} characters", None)
        try:
            return self._attempt(lambda solver, checker: grade(solver, checker, *job))
        except LostError as lost:
            return ProgramOutcome("crashed", passed, 0, None, line_of(lost), None, certain=False)

    def _attempt(self, use: Callable[[Sandbox, Sandbox], Result]) -> Result:
        """What is made of the sandboxes of this thread, one for programs and one for assertions; they may be lost."""
        if not hasattr(self._own, "pair"):
            self._own.pair = self.isolation.open(self.limits), self.isolation.open(self.limits)
            self._sandboxes.extend(self._own.pair)
        for _ in range(_ATTEMPTS):
            try:
                return use(*self._own.pair)
            except LostError as error:
                lost = error
        if isinstance(lost, StartError):
            raise RuntimeError(f"The sandbox {type(self.isolation).__name__} does not start any more: {line_of(lost)}.")
        raise lost


def _end(threads: ThreadPoolExecutor, sandboxes: list[Sandbox], pid: int) -> None:
    """Stop the threads, then what they started; nothing in a fork, whose they are not."""
    if pid == os.getpid():
        threads.shutdown(wait=True, cancel_futures=True)
        for sandbox in sandboxes:
            sandbox.close()


def _key(job: Job) -> bytes:
    program, tests, trace = job
    calls = [encode((call.arguments, call.result)) for call in tests.calls]
    text = json.dumps([program, tests.entry, calls, tests.assertions, tests.preamble, trace])
    return hashlib.sha256(text.encode()).digest()

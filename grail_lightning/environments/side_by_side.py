"""Functions run side by side in threads, each within a limit of seconds; one that does not return is abandoned.

A thread that waits inside C code cannot be ended. All threads are daemons, so none of them keeps the process alive. A
function that holds the interpreter's lock (a power of huge numbers, a regular expression of `re`) stops the limit's
clock as well; such work belongs in a process of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Literal, NamedTuple

_Step = Callable[[], Any]
_LOOP_ANSWERS = 1.0  # Seconds within which an event loop that is not blocked answers.


class Outcome(NamedTuple):
    """What became of a function."""

    status: Literal["done", "failed", "timeout"]
    value: Any  # What it returned; the exception, whatever its class, if it failed; None after a timeout.
    seconds: float


def side_by_side(jobs: Sequence[Sequence[_Step]], *, seconds: float, threads: int) -> list[list[Outcome]]:
    """Run jobs in at most `threads` threads at a time; the functions of a job run one after the other.

    A function that takes longer than `seconds` has the outcome `timeout`. Its thread is abandoned, and the functions
    of its job that follow are not run, so the job has fewer outcomes than functions. What the thread works with must
    not be used again: it may still be changing it. An exception ends its function, and the job goes on.

    Returns:
        The outcomes of each job, in the order of the jobs and of their functions.
    """
    assert threads > 0
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    waiting = iter([(row, steps) for row, steps in enumerate(jobs) if steps])
    reports: SimpleQueue[tuple[_Worker, Outcome]] = SimpleQueue()
    deadlines: dict[_Worker, float] = {}
    try:
        while True:
            for row, steps in islice(waiting, threads - len(deadlines)):
                worker = _Worker(row, steps, reports)
                deadlines[worker] = monotonic() + seconds
                worker.start()
            if not deadlines:
                return outcomes
            try:
                # Waits with a timeout can be interrupted by Ctrl-C.
                left = min(deadlines.values()) - monotonic()
                worker, outcome = reports.get(timeout=min(max(left, 0.0), 3600.0))
            except Empty:
                for worker in [worker for worker, deadline in deadlines.items() if deadline <= monotonic()]:
                    outcomes[worker.row].append(Outcome("timeout", None, seconds))
                    del deadlines[worker]
                    worker.abandon()
                continue
            if worker in deadlines:  # Else it was abandoned, and reports too late.
                outcomes[worker.row].append(outcome)
                deadlines[worker] = monotonic() + seconds
                if len(outcomes[worker.row]) == len(worker.steps):
                    del deadlines[worker]
    finally:
        for worker in deadlines:  # After an exception, such as Ctrl-C.
            worker.abandon()


class _Worker(threading.Thread):
    """The thread of one job."""

    def __init__(self, row: int, steps: Sequence[_Step], reports: SimpleQueue[tuple[_Worker, Outcome]]) -> None:
        super().__init__(name=f"job-{row}", daemon=True)
        self.row, self.steps, self._reports = row, steps, reports
        self.future: Future[Any] | None = None  # The coroutine that the thread waits for.
        self._abandoned = False
        self._ended = False
        self._ending = threading.Lock()

    def run(self) -> None:
        try:
            for step in self.steps:
                if self._abandoned:
                    return
                began = monotonic()
                try:
                    outcome = Outcome("done", step(), monotonic() - began)
                except BaseException as error:
                    outcome = Outcome("failed", error, monotonic() - began)
                self._reports.put((self, outcome))
        finally:
            with self._ending:
                self._ended = True

    def abandon(self) -> None:
        """No further function is run. One that runs Python code gets an exception, since an endless loop takes time."""
        self._abandoned = True
        future = self.future
        if future is not None:
            future.cancel()
            _replace_blocked_loop()
            return
        with self._ending:  # The number of a thread that has ended may be another's.
            if not self._ended and self.ident is not None:
                # Threads end silently by `SystemExit`.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))


def awaited(value: Any) -> Any:
    """The value, or what it returns if it is a coroutine or another awaitable.

    All of them run in one event loop, since clients such as `httpx.AsyncClient` belong to their first loop.
    """
    if not inspect.isawaitable(value):
        return value

    async def outcome() -> Outcome:
        try:
            return Outcome("done", await value, 0.0)
        except BaseException as error:  # `SystemExit` would end the loop.
            return Outcome("failed", error, 0.0)

    future = asyncio.run_coroutine_threadsafe(outcome(), _event_loop())
    worker = threading.current_thread()
    if isinstance(worker, _Worker):
        worker.future = future
    try:
        made = future.result()
    finally:
        if isinstance(worker, _Worker):
            worker.future = None
    if made.status == "failed":
        raise made.value
    return made.value


# A fork of the process has no thread of its parent, so it makes a loop of its own.
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}
_loops_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    with _loops_lock:
        loop, thread = _loops.get(os.getpid(), (None, None))
        if loop is None or thread is None or not thread.is_alive():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="async-tools", daemon=True)
            thread.start()
            _loops[os.getpid()] = loop, thread
        return loop


def _replace_blocked_loop() -> None:
    """A coroutine that blocks its loop (`time.sleep`) would block those of all later calls."""
    loop, answered = _event_loop(), threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(_LOOP_ANSWERS):
        with _loops_lock:
            if _loops.get(os.getpid(), (None, None))[0] is loop:
                del _loops[os.getpid()]

"""Functions run side by side in threads, each within a limit of seconds; one that does not return is abandoned.

The event loop of asynchronous tools and of clients of servers has a thread of its own here, too.

A thread that waits inside C code cannot be ended. All threads are daemons, so none of them keeps the process alive. A
function that holds the interpreter's lock (a power of huge numbers, a regular expression of `re`) stops the limit's
clock as well; such work belongs in a process of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any, Literal, NamedTuple


def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """The running event loop of this name. It stays: clients such as `httpx.AsyncClient` belong to their first loop."""
    return _loop(name, os.getpid())


@cache
def _loop(name: str, process: int) -> asyncio.AbstractEventLoop:  # A fork of the process has no thread of its parent.
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name=f"{name}-{process}", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop for ever. `SystemExit` in a task, one of `asyncio.gather` say, leaves it: all others would hang."""
    while True:
        with suppress(BaseException):  # The task has kept it, for whoever waits.
            loop.run_forever()


class CallOutcome(NamedTuple):
    """What became of a function."""

    status: Literal["done", "failed", "timeout"]
    value: Any  # What it returned; the exception, whatever its class, if it failed; None after a timeout.
    seconds: float


def side_by_side(
    functions: Sequence[Callable[[], Any]], seconds: Sequence[float], *, threads: int = 32
) -> list[CallOutcome]:
    """Run functions, each within its own limit of seconds, in at most `threads` threads at a time.

    What a function works with that took longer must not be used again: its thread may still be changing it.
    """
    workers = [_Worker(*pair) for pair in zip(functions, seconds, strict=True)]
    waiting, running = workers[::-1], list[_Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < threads:
                running.append(waiting.pop())
                running[-1].start()
            # Waits with a timeout can be interrupted by Ctrl-C.
            seconds_left = max(0.0, min(worker.left for worker in running))
            wait([worker.outcome for worker in running], timeout=min(seconds_left, 3600.0), return_when=FIRST_COMPLETED)
            for worker in running:
                if worker.left <= 0:
                    worker.abandon()
            running = [worker for worker in running if not worker.outcome.done()]
    finally:
        for worker in running:  # After an exception, such as Ctrl-C.
            worker.abandon()
    return [worker.outcome.result() for worker in workers]


class _Worker(threading.Thread):
    def __init__(self, function: Callable[[], Any], limit: float) -> None:
        super().__init__(daemon=True)
        self.function, self.limit = function, limit
        self.outcome: Future[CallOutcome] = Future()
        self.coroutine: Future[Any] | None = None  # What the thread waits for, or waited for last.
        self._ending = threading.Lock()

    def start(self) -> None:
        self.began = monotonic()
        super().start()

    @property
    def left(self) -> float:
        return self.began + self.limit - monotonic()

    def run(self) -> None:
        try:
            outcome = CallOutcome("done", self.function(), monotonic() - self.began)
        except BaseException as error:
            outcome = CallOutcome("failed", error, monotonic() - self.began)
        with self._ending:
            if not self.outcome.done():
                self.outcome.set_result(outcome)

    def abandon(self) -> None:
        """End a function that has no outcome. Python code gets an exception, since an endless loop takes time."""
        with self._ending:  # Held, because the number of a thread that has ended may be another's.
            if self.outcome.done():
                return
            self.outcome.set_result(CallOutcome("timeout", None, self.limit))
            if (self.coroutine is None or self.coroutine.done()) and self.ident is not None and not _is_traced():
                # Threads end silently by `SystemExit`.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit))
        if self.coroutine is not None and self.coroutine.cancel():
            _leave_blocked_loop()


def _is_traced() -> bool:
    """Whether a debugger or coverage traces threads, by a trace that makes all of them wait for such an exception.

    In Python 3.11 a traced thread repeats the first instruction of each function as long as an exception is set for
    any thread, and one that sleeps takes it when it wakes. Then an abandoned function is left to itself.
    """
    return sys.version_info < (3, 12) and (sys.gettrace() or threading.gettrace()) is not None


def restart_clock() -> None:
    """Give the function in whose thread this is called its whole limit of seconds again: it waited for others."""
    worker = threading.current_thread()
    if isinstance(worker, _Worker):
        worker.began = monotonic()


def awaited(value: Any) -> Any:
    """The value, or what it returns if it is a coroutine or another awaitable.

    All of them run in one event loop, since clients such as `httpx.AsyncClient` belong to their first loop.
    """
    if not inspect.isawaitable(value):
        return value

    async def outcome() -> CallOutcome:
        try:
            return CallOutcome("done", await value, 0.0)
        except BaseException as error:  # `SystemExit` would end the loop.
            return CallOutcome("failed", error, 0.0)

    future = asyncio.run_coroutine_threadsafe(outcome(), _event_loop())
    worker = threading.current_thread()
    if isinstance(worker, _Worker):
        worker.coroutine = future
    result = future.result()
    if result.status == "failed":
        raise result.value
    return result.value


_blocked: list[asyncio.AbstractEventLoop] = []


def _event_loop() -> asyncio.AbstractEventLoop:
    return background_loop(f"tools-{len(_blocked)}")


def _leave_blocked_loop() -> None:
    """A coroutine that blocks its loop (`time.sleep`) would block those of all later calls."""
    loop, answered = _event_loop(), threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(1.0) and loop is _event_loop():
        _blocked.append(loop)

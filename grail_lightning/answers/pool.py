"""Worker processes that can be killed: what may hang, swell or crash happens in them, never in the training process.

A worker is `python -m grail_lightning.answers.worker`, spoken to in JSON lines over its pipes. It is a fresh
interpreter, not a fork: it starts from any thread and inside daemonic processes (data loader workers), inherits no lock
and no GPU, and never imports the user's main script. It leaves when its standard input closes, that is, with its
parent; a job that runs at that moment is ended by the worker's own alarm, which the kernel delivers even inside C code.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import grail_lightning

__all__ = ["Worker", "WorkerPool"]


_PACKAGE_ROOT = str(Path(grail_lightning.__file__).resolve().parents[1])
_WORKER = "grail_lightning.answers.worker"
# Imports under load (a cold disk, all cores busy) may take a while; nothing of a model runs before a worker is ready.
_STARTUP_SECONDS = 120.0
_STARTUP_ATTEMPTS = 3
# Most pairs take less time than a round trip, so a worker gets some in advance. What waits in its pipe stays within one
# page, which every pipe holds: writing to a worker that hangs must not block.
_MOST_AHEAD = 8
_MOST_BYTES_AHEAD = 4096


class Worker:
    """One process and the jobs it was given; it works on the first, and `deadline` is that one's.

    Args:
        memory_bytes: limit of its address space.
    """

    def __init__(self, memory_bytes: int) -> None:
        path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            # -P: a `numbers.py` or `sympy/` in the current folder is not for the worker. A session of its own: Ctrl-C
            # is the parent's to handle.
            [sys.executable, "-P", "-m", _WORKER, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self.stdout = self.process.stdout.fileno()  # of its answers
        self.ready = False
        self.jobs: deque[int] = deque()
        self.deadline = time.monotonic() + _STARTUP_SECONDS
        self._received = b""

    def send(self, jobs: Sequence[int], lines: bytes, timeout_seconds: float) -> bool:
        """Give it jobs, one line each; False if it is dead."""
        if not self.jobs:
            self.deadline = time.monotonic() + timeout_seconds
        self.jobs.extend(jobs)
        try:
            self._stdin.write(lines)
            self._stdin.flush()
        except OSError:
            return False
        return True

    def receive(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """The answers that are complete by now; EOFError if it is dead."""
        chunk = os.read(self.stdout, 1 << 16)
        if not chunk:
            raise EOFError
        *lines, self._received = (self._received + chunk).split(b"\n")
        if lines:
            self.deadline = time.monotonic() + timeout_seconds
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        """End it, whatever it does, and take it off the process table."""
        self.process.kill()
        self.process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close our ends of its pipes."""
        if self.process.returncode is None:
            self.process.returncode = 0  # another process's child: not ours to wait for
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class WorkerPool:
    """Answers requests on up to `num_workers` processes, started when they are first needed.

    Args:
        num_workers: processes at most.
        timeout_seconds: wall-clock seconds for one request; then the process is killed and replaced.
        memory_bytes: limit of each process's address space.
    """

    def __init__(self, num_workers: int, timeout_seconds: float, memory_bytes: int) -> None:
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self.memory_bytes = memory_bytes
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.workers: list[Worker] = []
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _kill_all, self.workers, self._pid)

    def run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
        """The answer to each request, or `timeout` or `crashed`.

        Args:
            requests: JSON-like; each must fit what the worker program expects.

        Raises:
            RuntimeError: If no worker can be started at all.
        """
        if self._pid != os.getpid():  # we are a fork: the pipes are our parent's
            self._finalizer.detach()
            for worker in self.workers:
                worker.abandon()
            self._forget()
        with self._lock:
            try:
                return self._run(requests)
            except BaseException:  # also KeyboardInterrupt: a worker with half a job is of no use to the next call
                _kill_all(self.workers, self._pid)
                raise

    def close(self) -> None:
        """Kill the workers. The next request would start new ones."""
        if self._pid == os.getpid():
            with self._lock:
                _kill_all(self.workers, self._pid)

    def _run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
        answers: list[dict[str, Any] | str] = ["crashed"] * len(requests)
        timeout = {"timeout_seconds": self.timeout_seconds}
        lines = [json.dumps(request | timeout).encode() + b"\n" for request in requests]
        waiting = deque(range(len(requests)))
        while waiting or any(worker.jobs for worker in self.workers):
            self._start(waiting)
            self._hand_out(waiting, lines)
            for worker in self._listen():
                self._collect(worker, waiting, answers)
            self._end_overdue(waiting, answers)
        return answers

    def _start(self, waiting: deque[int]) -> None:
        free = sum(not worker.jobs for worker in self.workers)
        while len(self.workers) < self.num_workers and free < len(waiting):
            self.workers.append(Worker(self.memory_bytes))
            free += 1

    def _hand_out(self, waiting: deque[int], lines: Sequence[bytes]) -> None:
        # Fewer in advance towards the end, so that the workers finish together.
        most = min(_MOST_AHEAD, max(1, len(waiting) // (2 * self.num_workers)))
        for worker in [worker for worker in self.workers if worker.ready and 2 * len(worker.jobs) < most]:
            jobs = self._next_jobs(worker, waiting, lines, most)
            if jobs and not worker.send(jobs, b"".join(lines[job] for job in jobs), self.timeout_seconds):
                # It died while it was idle (the out-of-memory killer, a stray signal): that is not the request's fault.
                self._drop(worker, waiting)

    def _next_jobs(self, worker: Worker, waiting: deque[int], lines: Sequence[bytes], most: int) -> list[int]:
        jobs: list[int] = []
        size = sum(len(lines[job]) for job in worker.jobs)
        while waiting and len(worker.jobs) + len(jobs) < most:
            size += len(lines[waiting[0]])
            if (worker.jobs or jobs) and size > _MOST_BYTES_AHEAD:
                break
            jobs.append(waiting.popleft())
        return jobs

    def _listen(self) -> list[Worker]:
        watched = [worker for worker in self.workers if worker.jobs or not worker.ready]
        patience = min((worker.deadline for worker in watched), default=0.0) - time.monotonic()
        ready = wait([worker.stdout for worker in watched], max(0.0, patience))
        return [worker for worker in watched if worker.stdout in ready]

    def _collect(self, worker: Worker, waiting: deque[int], answers: list[dict[str, Any] | str]) -> None:
        try:
            received = worker.receive(self.timeout_seconds)
        except (EOFError, OSError, ValueError):
            if worker.jobs:
                worker.jobs.popleft()  # the one that it died of stays `crashed`
            self._drop(worker, waiting)
            return
        for answer in received:
            if worker.ready:
                answers[worker.jobs.popleft()] = answer
            worker.ready, self._failed_starts = True, 0

    def _end_overdue(self, waiting: deque[int], answers: list[dict[str, Any] | str]) -> None:
        for worker in list(self.workers):
            if (worker.jobs or not worker.ready) and worker.deadline <= time.monotonic():
                if worker.jobs:
                    answers[worker.jobs.popleft()] = "timeout"
                self._drop(worker, waiting)

    def _drop(self, worker: Worker, waiting: deque[int]) -> None:
        """End a worker; the jobs that it still has go to others."""
        worker.kill()
        self.workers.remove(worker)
        waiting.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        self._failed_starts += not worker.ready
        if self._failed_starts >= _STARTUP_ATTEMPTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"`Verifier` expected its worker processes to start, but got {_STARTUP_ATTEMPTS} in a row that ended "
                f"before they were ready (last exit code {worker.process.returncode}). `memory_gib` may be too small; "
                f"run `{sys.executable} -m {_WORKER} {self.memory_bytes}` by hand to see why."
            )


def _kill_all(workers: list[Worker], pid: int) -> None:
    while workers and pid == os.getpid():
        workers.pop().kill()

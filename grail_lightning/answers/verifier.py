"""Is the model's answer the reference answer? Grading in batches, safe with any text.

What may hang, swell or crash happens in worker processes that can be killed, never in the training process. A worker
runs `serve` and is spoken to in JSON lines over its pipes. It is a fresh interpreter, not a fork: it starts from any
thread and inside daemonic processes (data loader workers), inherits no lock and no GPU, and never imports the user's
main script. It leaves when its standard input closes, that is, with its parent; a job that runs at that moment is ended
by the worker's own alarm, which the kernel delivers even inside C code.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import grail_lightning
from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.judge import Judgement, judge
from grail_lightning.answers.library import load_libraries
from grail_lightning.answers.records import Verdict

_PACKAGE_ROOT = str(Path(grail_lightning.__file__).resolve().parents[1])
_WORKER = "from grail_lightning.answers.verifier import serve; serve()"
# Imports under load (a cold disk, all cores busy) may take a while; nothing of a model runs before a worker is ready.
_STARTUP_SECONDS = 120.0
_STARTUP_ATTEMPTS = 3
# The parent kills at the time limit. This alarm is for a parent that died itself: its default action ends the process
# in the kernel, even while C code holds the interpreter lock.
_GRACE_SECONDS = 1.0
_CACHED_CHARACTERS = 512
_FAULT = (
    "The verifier has a bug: %s, with the reference %.200r and the answer %.200r. The answer counts as not correct, "
    "with the status `crashed`. Please report the pair."
)
_log = logging.getLogger(__name__)


class _Worker:
    """One process, and the number of the request that it works on."""

    def __init__(self, memory_bytes: int) -> None:
        path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            # -P: a `numbers.py` or `sympy/` in the current folder is not for the worker. A session of its own: Ctrl-C
            # is the parent's to handle.
            [sys.executable, "-P", "-c", _WORKER, str(memory_bytes)],
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
        self.job: int | None = None
        self.deadline = time.monotonic() + _STARTUP_SECONDS

    def send(self, job: int, request: bytes, timeout_seconds: float) -> bool:
        """Give it a request; False if it is dead. It is idle and reads, so that the write cannot block."""
        self.deadline = time.monotonic() + timeout_seconds
        try:
            self._stdin.write(request + b"\n")
            self._stdin.flush()
        except OSError:
            return False
        self.job = job
        return True

    def receive(self) -> list[str]:
        """Its answer, or that it is ready; EOFError if it is dead. A line is shorter than what pipes keep whole."""
        line = os.read(self.stdout, 1 << 16)
        if not line:
            raise EOFError
        answer: list[str] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End it, whatever it does, close our ends of its pipes and take it off the process table."""
        with contextlib.suppress(OSError), self.process:
            self.process.kill()


class _WorkerPool:
    """Answers requests on up to `num_workers` processes, started when they are first needed.

    A process that takes longer than `timeout_seconds` (wall clock) for one request is killed and replaced. One that
    takes more than `cpu_seconds` of processor time ends by its own alarm, and is replaced.
    """

    def __init__(self, num_workers: int, timeout_seconds: float, cpu_seconds: float, memory_bytes: int) -> None:
        self.num_workers = num_workers
        self.timeout_seconds, self.cpu_seconds = timeout_seconds, cpu_seconds
        self.memory_bytes = memory_bytes
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.workers: list[_Worker] = []
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _kill_all, self.workers, self._pid)

    def run(self, pairs: Sequence[tuple[str, str]], conventions: dict[str, Any]) -> list[Judgement]:
        """What `judge` says of each pair, or that it timed out or crashed."""
        if self._pid != os.getpid():  # we are a fork: the pipes are our parent's
            self._finalizer.detach()
            for worker in self.workers:
                worker.process.returncode = 0  # not ours to wait for
            self._forget()
        with self._lock:
            try:
                limits = self.timeout_seconds, self.cpu_seconds
                return self._run([json.dumps([pair, conventions, *limits]).encode() for pair in pairs])
            except BaseException:  # also KeyboardInterrupt: a worker with half a job is of no use to the next call
                _kill_all(self.workers, self._pid)
                raise

    def close(self) -> None:
        """Kill the workers. The next request would start new ones."""
        if self._pid == os.getpid():
            with self._lock:
                _kill_all(self.workers, self._pid)

    def _run(self, requests: Sequence[bytes]) -> list[Judgement]:
        answers = [Judgement("crashed", "none")] * len(requests)
        waiting = deque(range(len(requests)))
        while waiting or any(worker.job is not None for worker in self.workers):
            self._hand_out(waiting, requests)
            busy = [worker for worker in self.workers if worker.job is not None or not worker.ready]
            patience = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
            heard = wait([worker.stdout for worker in busy], max(0.0, patience))
            for worker in busy:
                if worker.stdout in heard:
                    self._collect(worker, answers)
                elif worker.deadline <= time.monotonic():
                    if worker.job is not None:
                        answers[worker.job] = Judgement("timeout", "none")
                    self._drop(worker)
        return answers

    def _hand_out(self, waiting: deque[int], requests: Sequence[bytes]) -> None:
        """Start as many workers as there is work for, and give one request to each that is ready and idle."""
        idle = [worker for worker in self.workers if worker.job is None]
        for _ in range(min(len(waiting) - len(idle), self.num_workers - len(self.workers))):
            self.workers.append(_Worker(self.memory_bytes))
        for worker in idle:
            if waiting and worker.ready:
                if worker.send(waiting[0], requests[waiting[0]], self.timeout_seconds):
                    waiting.popleft()
                else:  # It died while it was idle (the out-of-memory killer): that is not the request's fault.
                    self._drop(worker)

    def _collect(self, worker: _Worker, answers: list[Judgement]) -> None:
        try:
            answer = worker.receive()
        except (EOFError, OSError, ValueError):
            self._drop(worker)  # the request that it died of stays `crashed`, but for one of too much processor time
            if worker.job is not None and worker.process.returncode == -signal.SIGPROF:
                answers[worker.job] = Judgement("timeout", "none")
            return
        if worker.job is not None:
            answers[worker.job] = Judgement(*answer)
        worker.ready, worker.job, self._failed_starts = True, None, 0

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self.workers.remove(worker)
        self._failed_starts += not worker.ready
        if self._failed_starts >= _STARTUP_ATTEMPTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"`Verifier` expected its worker processes to start, but got {_STARTUP_ATTEMPTS} in a row that ended "
                f"before they were ready (last exit code {worker.process.returncode}). `memory_gib` may be too small; "
                f"run `{sys.executable} -c '{_WORKER}' {self.memory_bytes}` by hand to see why."
            )


def _kill_all(workers: list[_Worker], pid: int) -> None:
    while workers and pid == os.getpid():
        workers.pop().kill()


# the program of a worker ----------------------------------------------------------------------------------------------
def serve() -> None:
    """Limit this process, tell the parent that it is ready, then answer until the parent closes the pipe."""
    _limit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a library that prints must not speak in our name
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)
    for ending in (signal.SIGINT, signal.SIGTERM):  # They reach whole process groups; the parent decides, and kills.
        signal.signal(ending, signal.SIG_IGN)
    load_libraries()
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(BrokenPipeError):
        answers.write(b"[]\n")
        for line in sys.stdin.buffer:
            (gold, prediction), conventions, timeout_seconds, cpu_seconds = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_seconds + _GRACE_SECONDS)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            outcome = judge(gold, prediction, Conventions(**conventions), slow=True)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
            answers.write(json.dumps(outcome).encode() + b"\n")


def _limit(memory_bytes: int) -> None:
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes or resource.RLIM_INFINITY)):
        with contextlib.suppress(ValueError, OSError):  # macOS knows the second but does not take it
            resource.setrlimit(limit, (most, most))


class Verifier:
    """Compares bare answers with references: cheap layers here, the others in worker processes that can be killed.

    A context manager; workers start with the first pair that needs one. Safe to call from any thread and in any
    process, forked or daemonic. Whatever the strings are, `grade` returns a verdict for each. An exception inside a
    layer is a bug of this package: its pair is `crashed`, `faults` counts it, and the first such pair is logged.

    Args:
        num_workers: worker processes at most; None for the usable cores, eight at most.
        timeout_seconds: seconds for one pair in a worker; then it counts as wrong (`timeout`).
        cpu_seconds: processor seconds for it, whatever else the machine does; right answers take at most a quarter of
            one.
        memory_gib: limit of each worker's address space, in GiB.
        cache_size: verdicts kept for pairs that come again (a group asks one question many times).
        conventions: what counts as equal where people differ; None for the defaults.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_seconds: float = 5.0,
        cpu_seconds: float = 1.0,
        memory_gib: float = 2.0,
        cache_size: int = 1 << 16,
        conventions: Conventions | None = None,
    ) -> None:
        if num_workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            num_workers = min(8, cores)
        if num_workers < 1:
            raise ValueError(f"`num_workers` must be 1 or more, but got {num_workers}. Leave it out for one a core.")
        for name, seconds, default in (("timeout_seconds", timeout_seconds, 5), ("cpu_seconds", cpu_seconds, 1)):
            if not seconds > 0:
                raise ValueError(f"`{name}` must be above 0, but got {seconds}. Try {default}.")
        self.cache_size = cache_size
        self.conventions = conventions or Conventions()
        self._settings = (num_workers, timeout_seconds, cpu_seconds, memory_gib, cache_size, self.conventions)
        self._pool = _WorkerPool(num_workers, timeout_seconds, cpu_seconds, int(memory_gib * 2**30))
        self._cache: dict[tuple[str, str], Judgement] = {}
        self._cache_lock = threading.Lock()
        self._pid = os.getpid()
        self.faults: Counter[str] = Counter()

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict a pair, in order.

        Args:
            pairs: (gold, prediction), both bare answers: the content of the last box, not the whole response.
        """
        for gold, prediction in pairs:
            if not isinstance(gold, str) or not isinstance(prediction, str):
                raise ValueError(
                    f"`pairs` must hold (gold, prediction) as two strings, but got ({gold!r}, {prediction!r}). "
                    "A response without an answer is `Verdict.missing(gold)`."
                )
        if self._pid != os.getpid():  # a fork: its copy of the lock may be held by a thread that does not exist here
            self._cache_lock, self._pid = threading.Lock(), os.getpid()
        outcomes: dict[tuple[str, str], Judgement] = {}
        waiting = []
        for pair in dict.fromkeys((gold, prediction) for gold, prediction in pairs):
            outcome = self._cache.get(pair) or judge(*pair, self.conventions)
            if outcome is None:
                waiting.append(pair)
            else:
                outcomes[pair] = outcome
        if waiting:
            outcomes |= zip(waiting, self._pool.run(waiting, asdict(self.conventions)), strict=True)
        self._keep(outcomes)
        return [
            Verdict(correct=status == "right", status=status, layer=layer, gold=gold, prediction=prediction)
            for (gold, prediction), (status, layer, _) in ((pair, outcomes[pair[0], pair[1]]) for pair in pairs)
        ]

    def _keep(self, outcomes: dict[tuple[str, str], Judgement]) -> None:
        with self._cache_lock:
            for pair, outcome in outcomes.items():
                if outcome.fault:
                    self.faults[outcome.fault] += 1
                    if self.faults[outcome.fault] == 1:
                        _log.warning(_FAULT, outcome.fault, *pair)
                # A crash may be the machine's: another try is cheap.
                elif outcome.status != "crashed" and len(pair[0]) + len(pair[1]) <= _CACHED_CHARACTERS:
                    self._cache[pair] = outcome
            while len(self._cache) > self.cache_size:
                del self._cache[next(iter(self._cache))]

    def close(self) -> None:
        """End the workers; grading again starts new ones."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._settings

"""Runs programs of a policy on their tests, many at a time, where they can do no harm."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from grail_lightning.programs.grade import grade, line_of, printed
from grail_lightning.programs.guest import encode
from grail_lightning.programs.outcome import Call, Limits, Outcome, Tests
from grail_lightning.programs.remote import RemoteSandbox
from grail_lightning.programs.sandbox import COMMANDS, LostError, Sandbox, StartError

AUTO = ("bubblewrap", "sandlock", "wasm")
"""What `auto` tries, in this order; docs/sandbox.md has the figures."""

_MAX_CHARACTERS = 1 << 17
_ATTEMPTS = 20
_LARGEST = 1 << 20
_MOST_KEPT = 50_000  # Outcomes: some 50 MB. Those with traces are not kept.
_PROBE = Path(__file__).with_name("probe.py")

Result = TypeVar("Result")
Job = tuple[str, Tests] | tuple[str, Tests, int]


def _is_address(backend: str) -> bool:
    return backend.startswith(("http://", "https://"))


def _sandbox(backend: str, limits: Limits) -> Sandbox:
    return (RemoteSandbox if _is_address(backend) else Sandbox)(backend, limits)


@lru_cache
def refusal(backend: str) -> str:
    """Why a back end cannot be used here, found out by a program that tries to get out; empty if it can."""
    if _is_address(backend):
        sandbox = _sandbox(backend, Limits())
        try:
            outcome = grade(sandbox, sandbox, "def f():\n    return 1", Tests(entry="f", calls=(Call((), 1),)))
        except LostError as error:
            return line_of(error)
        return outcome.message
    with tempfile.TemporaryDirectory(prefix="grail_probe_") as folder:
        Path(folder, "secret").touch()
        files = [f"{folder}/secret", str(_PROBE), "/etc/passwd", f"/proc/{os.getpid()}/environ"]
        tests = Tests(entry="probe", calls=(Call((files, [folder, "/proc"], os.getpid()), []),))
        sandbox = Sandbox(backend, Limits(seconds=10.0))
        try:
            outcome = grade(sandbox, sandbox, _PROBE.read_text(), tests)
        except (OSError, ImportError, LostError) as error:
            return line_of(error)
        finally:
            sandbox.close()
    return "" if outcome.status == "passed" else f"it does not isolate: {outcome.message or outcome.status}"


def choose(backend: str = "auto") -> str:
    """The back end itself, or the first one of `auto` that isolates here.

    Raises:
        ValueError: There is no back end of that name.
        RuntimeError: It does not isolate programs on this machine, or none does.
    """
    if backend not in ("auto", *COMMANDS) and not _is_address(backend):
        raise ValueError(f"`backend` must be one of auto, {', '.join(COMMANDS)}, or an address, but got {backend!r}.")
    reasons = []
    for name in AUTO if backend == "auto" else (backend,):
        reason = refusal(name)
        if not reason:
            return name
        reasons.append(f"{name}: {reason}")
    raise RuntimeError(f"Nothing isolates programs here ({'; '.join(reasons)}); docs/sandbox.md says what would.")


class Executor:
    """Runs programs in sandboxes, and keeps their outcomes by the program's text and its tests.

    Args:
        backend: `sandlock`, `bubblewrap`, `wasm`, or `auto`: the first of them that isolates on this machine, which a
            program that tries to get out finds out. Or the address of a server that runs programs in SandboxFusion's
            form, such as `http://127.0.0.1:8080/run_code`, whose isolation nobody checks.
        limits: Of one program with all of its tests.
        workers: How many programs run at a time.

    Raises:
        ValueError: An argument is out of range.
        RuntimeError: Nothing isolates programs on this machine. They are never run without.
    """

    def __init__(self, backend: str = "auto", limits: Limits = Limits(), workers: int = 2) -> None:  # noqa: B008
        if limits.processes != 1:
            raise ValueError(f"`limits.processes` must be 1: none starts another, but got {limits.processes}.")
        if not all(0 < x <= _LARGEST for x in (limits.seconds, limits.memory_mb, limits.output_kb, workers)):
            said = f"`limits` and `workers` must be positive and at most {_LARGEST:,}, but got {limits} and {workers}."
            raise ValueError(said)
        self.backend = choose(backend)
        self.limits = limits
        self.workers = workers
        self._kept: dict[bytes, Outcome] = {}
        self._forget()

    def __reduce__(self) -> tuple[object, ...]:
        return Executor, (self.backend, self.limits, self.workers)

    def run(self, program: str, tests: Tests, *, trace: int | None = None) -> Outcome:
        """What becomes of a program on its tests, or, with its trace, on the test ``trace`` alone."""
        return self.run_many([(program, tests) if trace is None else (program, tests, trace)])[0]

    def run_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of each job, in their order; equal jobs run once.

        Raises:
            ValueError: Tests hold what is no literal, or there is no such test.
        """
        if self._pid != os.getpid():  # we are a fork: threads and pipes are our parent's
            self._forget()
        keys = [_key(job) for job in jobs]
        outcomes = {key: outcome for key in keys if (outcome := self._kept.get(key)) is not None}
        fresh = {key: job for key, job in zip(keys, jobs, strict=True) if key not in outcomes}
        futures = [self._threads.submit(self._run, job) for job in fresh.values()]
        try:
            outcomes |= dict(zip(fresh, (future.result() for future in futures), strict=True))
        finally:
            for future in futures:
                future.cancel()
        with self._lock:
            self._kept |= {key: outcomes[key] for key in fresh if outcomes[key].trace is None}
            while len(self._kept) > _MOST_KEPT:  # the newest stay
                del self._kept[next(iter(self._kept))]
        return [outcomes[key] for key in keys]

    def printed(self, program: str) -> str:
        """What a program without tests prints, and the end of its traceback; nothing of it is kept."""
        if self._pid != os.getpid():
            self._forget()
        return self._threads.submit(self._attempt, lambda solver, _: printed(solver, program)).result()

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

    def _run(self, job: Job) -> Outcome:
        """In a thread of ours."""
        program, tests, *trace = job
        passed = (False,) * (len(trace) or len(tests.calls) + len(tests.assertions))
        if len(program) > _MAX_CHARACTERS:
            return Outcome("refused", passed, 0, None, f"a program of {len(program)} characters", None)
        try:
            return self._attempt(lambda *both: grade(both[0], both[1], program, tests, trace[0] if trace else None))
        except LostError as lost:
            return Outcome("crashed", passed, 0, None, line_of(lost), None)

    def _attempt(self, use: Callable[[Sandbox, Sandbox], Result]) -> Result:
        """What is made of the sandboxes of this thread, one for programs and one for assertions; they may be lost."""
        if not hasattr(self._own, "pair"):
            self._own.pair = _sandbox(self.backend, self.limits), _sandbox(self.backend, self.limits)
            self._sandboxes.extend(self._own.pair)
        for _ in range(_ATTEMPTS):
            try:
                return use(*self._own.pair)
            except LostError as error:
                lost = error
        if isinstance(lost, StartError):
            raise RuntimeError(f"The sandbox {self.backend} does not start any more: {line_of(lost)}.")
        raise lost


def _end(threads: ThreadPoolExecutor, sandboxes: list[Sandbox], pid: int) -> None:
    """Stop the threads, then what they started; nothing in a fork, whose they are not."""
    if pid == os.getpid():
        threads.shutdown(wait=True, cancel_futures=True)
        for sandbox in sandboxes:
            sandbox.close()


def _key(job: Job) -> bytes:
    """A job's digest.

    Raises:
        ValueError: Its tests cannot be given to a program.
    """
    program, tests, *trace = job
    num_tests = len(tests.calls) + len(tests.assertions)
    if trace and not 0 <= trace[0] < num_tests:
        raise ValueError(f"`trace` must be one of the {num_tests} tests, from 0, but got {trace[0]}.")
    calls = []
    for index, call in enumerate(tests.calls):
        try:
            calls.append(encode((call.arguments, call.result)))
        except TypeError as error:
            raise ValueError(f"Test {index} must hold literals, but {error}.") from None
    text = json.dumps([program, tests.entry, calls, tests.assertions, tests.preamble, trace])
    return hashlib.sha256(text.encode()).digest()

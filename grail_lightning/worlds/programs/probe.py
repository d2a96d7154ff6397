"""What isolates programs on this machine, found out by a program that tries to get out."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from grail_lightning.core.runtime.pages import page
from grail_lightning.worlds.programs.grade import grade, line_of
from grail_lightning.worlds.programs.isolation import Bubblewrap, Isolation, Sandlock
from grail_lightning.worlds.programs.outcome import ProgramLimits, TestCall, Tests
from grail_lightning.worlds.programs.sandbox import LostError

LOCAL = (Bubblewrap(), Sandlock())
"""What is tried where no isolation is named, in this order; the page "Programs in a sandbox" has the figures."""


def probe(files: list[str], folders: list[str], process: int) -> list[str]:
    """What a program could do and may not. Its text is run like that of any other, before an isolation is used."""
    import contextlib
    import os
    import socket

    done = []

    def attempt(name: str, action: Callable[[str], object], *targets: str) -> None:
        for target in targets:
            with contextlib.suppress(Exception):
                action(target)
                done.append(f"{name} {target}")

    attempt("read", lambda path: open(path).close(), *files)
    attempt("list", os.listdir, *folders)
    attempt("write to", lambda path: os.close(os.open(f"{path}/left", os.O_WRONLY | os.O_CREAT)), *folders, ".")
    attempt("open", lambda family: socket.socket(getattr(socket, family)).close(), "AF_INET", "AF_UNIX", "AF_NETLINK")
    attempt("signal", lambda _: os.kill(process, 0), "a process")
    attempt("start", lambda _: os.waitpid(os.fork() or os._exit(0), 0), "a process")
    return done + ["read the environment"] * bool(os.environ)


@lru_cache
def refusal(isolation: Isolation) -> str:
    """Why an isolation cannot be used here, found out by a program that tries to get out; empty if it can."""
    with tempfile.TemporaryDirectory(prefix="grail_probe_") as folder:
        Path(folder, "secret").touch()
        files = [f"{folder}/secret", __file__, "/etc/passwd", f"/proc/{os.getpid()}/environ"]
        program = f"from collections.abc import Callable\n{inspect.getsource(probe)}"
        if not isolation.is_tried:
            program = "def probe(*_): return []"
        tests = Tests(entry="probe", calls=(TestCall((files, [folder, "/proc"], os.getpid()), []),))
        try:
            sandbox = isolation.open(ProgramLimits(seconds=10.0))
            try:
                outcome = grade(sandbox, sandbox, program, tests)
            finally:
                sandbox.close()
        except (OSError, ImportError, RuntimeError, LostError) as error:
            return line_of(error)
    return "" if outcome.status == "passed" else f"it does not isolate: {outcome.message or outcome.status}"


def choose(isolation: Isolation | None) -> Isolation:
    """The isolation itself, or for None the first of `LOCAL` that isolates here; RuntimeError if it does not."""
    if not isinstance(isolation, Isolation | None):
        raise ValueError(f"`isolation` must be one such as Bubblewrap(), or None, but got {isolation!r}.")
    if type(isolation).__hash__ is None:
        raise ValueError(f"`isolation` must be hashable, but got {isolation!r}. Make its class a frozen dataclass.")
    reasons = []
    for tried in LOCAL if isolation is None else (isolation,):
        reason = refusal(tried)
        if not reason:
            return tried
        reasons.append(f"{type(tried).__name__}: {reason}")
    raise RuntimeError(
        f"Nothing isolates programs here ({'; '.join(reasons)}); {page('reference/sandbox.md')} says what would."
    )

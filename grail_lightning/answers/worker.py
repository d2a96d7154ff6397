"""The program of a worker process: reads one pair per line from its standard input, writes one outcome per line.

`python -m grail_lightning.answers.worker MEMORY_BYTES`; started by `pool.py`, not by hand.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.judge import fault_of, judge
from grail_lightning.answers.values import contexts

# The parent kills at the time limit. This alarm is for a parent that died itself: its default action ends the process
# in the kernel, even while C code holds the interpreter lock.
_GRACE_SECONDS = 1.0


def main() -> None:
    """Limit this process, tell the parent that it is ready, then answer until the parent closes the pipe."""
    _limit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a library that prints must not speak in our name
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for ending in (signal.SIGINT, signal.SIGTERM):  # They reach whole process groups; the parent decides, and kills.
        signal.signal(ending, signal.SIG_IGN)
    load()
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps({"ready": os.getpid()}).encode() + b"\n")
        for line in sys.stdin.buffer:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, request["timeout_seconds"] + _GRACE_SECONDS)
            outcome = _answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(json.dumps(outcome).encode() + b"\n")


def load() -> None:
    """Import what answering needs, so that no pair pays for it."""
    from grail_lightning.answers import external  # noqa: F401

    contexts()
    logging.disable(logging.CRITICAL)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        outcome = judge(request["gold"], request["prediction"], Conventions(**request["conventions"]), slow=True)
    except Exception as error:  # a bug of a layer costs this one answer, and is told
        fault = "" if isinstance(error, MemoryError) else fault_of(error)
        return {"status": "crashed", "layer": "none", "fault": fault}
    assert outcome is not None
    return {"status": outcome.status, "layer": outcome.layer, "fault": ""}


def _limit(memory_bytes: int) -> None:
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes or resource.RLIM_INFINITY)):
        with contextlib.suppress(ValueError, OSError):  # macOS knows the second but does not take it
            resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    main()

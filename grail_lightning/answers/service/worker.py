"""The program of a worker process: reads one pair per line from its standard input, writes one outcome per line.

`python -m grail_lightning.answers.service.worker MEMORY_BYTES`; started by `pool.py`, not by hand.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

__all__ = ["main"]

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
    from grail_lightning.answers.compare import symbolic

    symbolic.load()
    with contextlib.suppress(BrokenPipeError):
        _say(answers, {"ready": os.getpid()})
        for line in sys.stdin.buffer:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, request["timeout_seconds"] + _GRACE_SECONDS)
            outcome = _answer(request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _say(answers, outcome)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from grail_lightning.answers.compare.conventions import Conventions
    from grail_lightning.answers.compare.judge import judge
    from grail_lightning.answers.service.faults import fault_of

    try:
        outcome = judge(request["gold"], request["prediction"], Conventions(**request["conventions"]), slow=True)
    except MemoryError:
        return {"status": "crashed", "layer": "none", "fault": ""}
    except Exception as error:  # a bug of a layer costs this one answer, and is told
        return {"status": "crashed", "layer": "none", "fault": fault_of(error)}
    assert outcome is not None
    return {"status": outcome.status, "layer": outcome.layer, "fault": ""}


def _say(answers: BinaryIO | Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")


def _limit(memory_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit but does not take it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):
        if memory_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main()

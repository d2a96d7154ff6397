"""A sandbox on a server that runs scripts, whose isolation is its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from grail_lightning.core.runtime.http import LongAnswer, NoAnswer, post_blocking
from grail_lightning.worlds.programs.outcome import ProgramLimits
from grail_lightning.worlds.programs.sandbox import EndedError, LostError, Sandbox, StartError, read_reply

_GUEST = Path(__file__).parent / "guest.py"
_QUEUE_SECONDS = 60.0  # How long a request may wait for its turn.
_SCRIPT = """
import json, os, sys
messages, out, names = iter(json.loads({messages!r})), sys.stdout, {{"__name__": "guest"}}
exec({guest!r}, names)
def door(reply):
    for message in messages:
        return message
    out.write("\\n" + reply.decode())
    out.flush()
    os._exit(0)
names["serve"](door)
"""


class RemoteSandbox(Sandbox):
    """A server that runs scripts. Each message is a script of its own, in which the messages before are repeated.

    So a program still gets the arguments of one call at a time and never what is expected, and the server keeps nothing
    between requests. What a script prints last is its answer, which nobody vouches for.
    """

    def __init__(self, url: str, limits: ProgramLimits) -> None:
        super().__init__(limits)
        self.url = url

    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """See `Sandbox`."""
        self._messages: list[str] = []
        return self.ask({"output": self.limits.output_kb << 10} | message)

    def ask(self, message: dict[str, Any], more: int = 0) -> dict[str, Any]:
        """See `Sandbox`; an answer of any kind has the same limit."""
        self._messages.append(json.dumps(message))
        script = _SCRIPT.format(messages=json.dumps(self._messages), guest=_GUEST.read_text())
        result = self._post(script)
        if result.get("status") == "TimeLimitExceeded":
            raise EndedError("timeout", f"no end after {self.wall_seconds:g} seconds", certain=False)
        reply = read_reply(str(result.get("stdout")).rpartition("\n")[2])
        if reply is None:
            raise EndedError("crashed", f"ended the process with exit code {result.get('return_code')}")
        return reply

    def _post(self, script: str) -> dict[str, Any]:
        body = {
            "code": script,
            "language": "python",
            "run_timeout": self.wall_seconds,
            "memory_limit_MB": self.limits.memory_mb + 64,
        }
        seconds = self.wall_seconds + _QUEUE_SECONDS
        try:
            answer = post_blocking(self.url, body, seconds=seconds)
        except LongAnswer as error:
            raise EndedError("output", str(error)) from None
        except NoAnswer as error:
            answer, reason = None, str(error)
        if answer is None or not 200 <= answer.status < 300:
            time.sleep(1.0)  # A server that is started again needs time.
            raise StartError(f"{self.url} did not answer ({reason if answer is None else f'status {answer.status}'})")
        told = read_reply(answer.text) or {}
        result = told.get("run_result")
        if told.get("status") in ("Success", "Failed") and isinstance(result, dict):
            return result
        raise LostError(f"{self.url} answered {answer.text[:200]!r}")

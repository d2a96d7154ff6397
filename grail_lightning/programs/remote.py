"""Programs that a server runs, over HTTP in the form of SandboxFusion's `/run_code`. Isolation is the server's."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from grail_lightning.programs.sandbox import EndedError, LostError, Sandbox, StartError

_GUEST = Path(__file__).with_name("guest.py")
_MOST_BYTES = 8_000_000  # Of an answer.
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
        try:
            reply = json.loads(str(result.get("stdout")).rpartition("\n")[2])
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise EndedError("crashed", f"ended the process with exit code {result.get('return_code')}")
        return reply

    def _post(self, script: str) -> dict[str, Any]:
        """What became of a script."""
        body = {
            "code": script,
            "language": "python",
            "run_timeout": self.wall_seconds,
            "memory_limit_MB": self.limits.memory_mb + 64,
        }
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.backend, data, headers)  # noqa: S310 (`choose` takes http alone)
        try:
            with urllib.request.urlopen(request, timeout=self.wall_seconds + _QUEUE_SECONDS) as answer:  # noqa: S310
                text = answer.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            time.sleep(1.0)  # A server that is started again needs time.
            raise StartError(f"{self.backend} did not answer ({error})") from None
        if len(text) > _MOST_BYTES:
            raise EndedError("output", f"an answer of more than {_MOST_BYTES} bytes")
        try:
            told = json.loads(text)
            if told["status"] in ("Success", "Failed"):
                return dict(told["run_result"])
        except (ValueError, RecursionError, LookupError, TypeError):
            pass
        raise LostError(f"{self.backend} answered {text[:200]!r}")

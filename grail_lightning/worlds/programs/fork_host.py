"""The process that runs programs natively: a warm interpreter forks a confined child for each of them.

It runs inside of the sandbox that its isolation makes, and `python -c` gets its text after that of guest.py.
"""

import json
import os
import sys
from collections.abc import Callable

if __name__ != "__main__":  # A type checker, or a reader; the sandbox sees no file of this package.
    from grail_lightning.worlds.programs.guest import Message, door_of, serve

_CONNECTION = 3  # The one file that a child has, besides /dev/null.


def _confinement(config: Message) -> Callable[[], None]:
    """A function that limits its process and then filters its system calls, both for good."""
    import ctypes
    import resource
    import signal

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    prctl, code = ctypes.CDLL(None).prctl, bytes.fromhex(config["filter"])
    rules, seconds = Filter(len(code) // 8, code), config["seconds"]
    memory = (config["memory_mb"] + 64) << 20  # the interpreter's own, besides
    limits = {"CPU": int(seconds) + 1, "AS": memory, "CORE": 0, "FSIZE": 0, "NOFILE": 32}

    def confine() -> None:
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no program outlives the process that started it
        # The program cannot take this timer back, nor catch or block its signal: the filter has no call for it.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.byref(rules), 0, 0):
            os._exit(78)

    prctl(1, signal.SIGKILL, 0, 0, 0)
    return confine


def main(config: Message) -> None:
    """Fork a confined child for each connection that comes over the first file; after each, write its status there."""
    import socket

    for name in config["preload"]:
        __import__(name)
    sys.argv = [""]  # A program must not read the configuration.
    os.environ.clear()
    confine, nowhere = _confinement(config), os.open("/dev/null", os.O_RDWR)
    control = socket.socket(fileno=0)
    sys.modules["gc"].freeze()  # children share what is not written to
    control.send(b"ready\n")
    while connections := socket.recv_fds(control, 1, 1)[1]:
        child = os.fork()
        if child == 0:
            for standard in range(_CONNECTION):  # `control` is one of them.
                os.dup2(nowhere, standard)
            os.dup2(connections[0], _CONNECTION)
            os.closerange(_CONNECTION + 1, 64)
            door = door_of(_CONNECTION)
            confine()
            serve(door)
        os.close(connections[0])
        control.send(b"%d\n" % os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

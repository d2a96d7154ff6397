"""A program that tries what a sandbox has to keep it from. Its text is run like any other, before a back end is used."""

import contextlib
import os
import socket


def probe(files, folders, process):
    """What it could do that it may not: read those files, list the folders, see the process, and so on."""
    done = []

    def attempt(name, action):
        with contextlib.suppress(Exception):
            action()
            done.append(name)

    for path in files:
        attempt(f"read {path}", lambda path=path: open(path).close())  # noqa: SIM115
    for path in folders:
        attempt(f"list {path}", lambda path=path: os.listdir(path))
    for path in [*folders, ".", "/tmp"]:
        attempt(f"write to {path}", lambda path=path: os.close(os.open(path + "/left", os.O_WRONLY | os.O_CREAT)))
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        attempt(f"open a socket of {family}", lambda family=family: socket.socket(getattr(socket, family)).close())
    attempt("send a signal", lambda: os.kill(process, 0))
    attempt("start a process", lambda: os.waitpid(os.fork() or os._exit(0), 0))
    if os.environ:
        done.append("read the environment")
    return done

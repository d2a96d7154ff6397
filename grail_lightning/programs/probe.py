"""A program that tries what a sandbox has to prevent. Its text is run like any other, before a back end is used."""

import contextlib
import os
import socket
from collections.abc import Callable


def probe(files: list[str], folders: list[str], process: int) -> list[str]:
    """What it could do and may not: read the files, list the folders or write there, signal the process, and so on."""
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

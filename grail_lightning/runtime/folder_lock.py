"""At most one run in a folder: a lock that ends with its process, and names it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

LOCK = ".grail_lightning.lock"
BEAT_SECONDS = 5.0
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def held(folder: Path, patience: float = 6 * BEAT_SECONDS) -> Iterator[None]:
    """Hold a folder, which is made if need be, against other processes.

    The operating system releases its lock when the holder ends, however it ends. Some network file systems keep locks
    within one host, and some have none. The file therefore names its holder as well, and the holder touches it every
    few seconds: a holder on another host that does not do so for `patience` seconds has ended.

    Args:
        folder: What to hold.
        patience: Seconds in which a live holder on another host has to show itself.

    Raises:
        ValueError: If another process holds it.
    """
    file = folder / LOCK
    handle = _acquire(file, patience)
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(handle.fileno(), ended), daemon=True)
    try:
        handle.seek(0)
        handle.truncate()
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, handle)
        handle.flush()
        beating.start()
        yield
    finally:
        ended.set()
        if beating.ident is not None:
            beating.join()
        if _is_at(file, handle):
            file.unlink()
        handle.close()


def _acquire(file: Path, patience: float) -> TextIO:
    """The open lock file, locked. Whoever held it before may have removed or moved it just now: then once more."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("a+")
        try:
            _lock(file, handle, patience)
            if _is_at(file, handle):
                return handle
        except BaseException:
            handle.close()
            raise
        handle.close()


def _lock(file: Path, handle: TextIO, patience: float) -> None:
    known = True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_refusal(file, _holder(handle))) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        known = False
    holder = _holder(handle)
    gone = known and holder.get("host") in (None, socket.gethostname())
    if not gone and _beats(file, patience):
        raise ValueError(_refusal(file, holder))


def _refusal(file: Path, holder: dict[str, Any]) -> str:
    who = "process {pid} on {host}, since {since}".format(**{"pid": "?", "host": "?", "since": "?"} | holder)
    return (
        f"A run must have its folder to itself, but {file.parent} is in use by another fit ({who}). Wait for it or "
        "stop it, or give this run another folder: `trainer.logger.init_args.name`, or `trainer.default_root_dir` "
        "without a logger."
    )


def _holder(handle: TextIO) -> dict[str, Any]:
    """Who wrote the file; empty where nobody did, or is about to."""
    handle.seek(0)
    try:
        return dict(json.load(handle))
    except ValueError:
        return {}


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        os.utime(descriptor)


def _beats(file: Path, patience: float) -> bool:
    """Whether somebody touches the file. Only its own times are compared, so hosts may have different clocks."""
    with suppress(FileNotFoundError):  # The holder has just ended.
        before, deadline = _touched(file), time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, patience / 10))
            if _touched(file) != before:
                return True
    return False


def _touched(file: Path) -> int:
    # Opened anew each time: a network file system may otherwise answer from its cache.
    with file.open() as handle:
        return os.fstat(handle.fileno()).st_mtime_ns


def _is_at(file: Path, handle: TextIO) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False

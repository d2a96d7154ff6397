"""A lock that allows one run in a folder. It is released when its process ends, and names that process."""

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
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def held(folder: Path, patience: float = 6 * BEAT_SECONDS, user: str = "fit") -> Iterator[int]:
    """Lock a folder, which is created if it does not exist, against other processes.

    The operating system releases the lock when its process ends, for whatever reason. Some network file systems apply
    locks within one host only, and some have none. The file therefore also names its process, which updates the file's
    time every few seconds: a process on another host that has not done so for `patience` seconds has ended.

    Args:
        folder: The folder to lock.
        patience: Seconds within which a live process on another host must update the file.
        user: What uses the folder, for the message.

    Yields:
        The descriptor of the locked file. A process that inherits it keeps the folder locked after this one has died.

    Raises:
        ValueError: If another process has locked it.
    """
    file = folder / LOCK
    handle = _acquire(file, patience, user)
    ended = threading.Event()
    beating = threading.Thread(target=_beat, args=(handle.fileno(), ended), daemon=True)
    try:
        handle.seek(0)
        handle.truncate()
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, handle)
        handle.flush()
        beating.start()
        yield handle.fileno()
    finally:
        ended.set()
        if beating.ident is not None:
            beating.join()
        if _is_at(file, handle):
            file.unlink()
        handle.close()


def _acquire(file: Path, patience: float, user: str) -> TextIO:
    """The open lock file, locked. If a former holder removed or moved it at the same time, this tries again."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("a+")
        try:
            _lock(file, handle, patience, user)
            if _is_at(file, handle):
                return handle
        except BaseException:
            handle.close()
            raise
        handle.close()


def _lock(file: Path, handle: TextIO, patience: float, user: str) -> None:
    known = True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_refusal(file, _holder(handle), user)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        known = False
    holder = _holder(handle)
    gone = known and holder.get("host") in (None, socket.gethostname())
    if not gone and _beats(file, patience):
        raise ValueError(_refusal(file, holder, user))


def _refusal(file: Path, holder: dict[str, Any], user: str) -> str:
    who = "process {pid} on {host}, since {since}".format(**{"pid": "?", "host": "?", "since": "?"} | holder)
    return (
        f"A run must have its folder to itself, but {file.parent} is in use by another {user} ({who}). Wait for it or "
        "stop it, or give this run another folder: `trainer.logger.init_args.name`, or `trainer.default_root_dir` "
        "without a logger."
    )


def _holder(handle: TextIO) -> dict[str, Any]:
    """The process that the file names; empty if it names none, or none yet."""
    handle.seek(0)
    try:
        return dict(json.load(handle))
    except ValueError:
        return {}


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        os.utime(descriptor)


def _beats(file: Path, patience: float) -> bool:
    """Whether a process updates the file. Only the file's own times are compared, so clocks of hosts may differ."""
    with suppress(FileNotFoundError):  # The holder has just ended.
        before, deadline = _touched(file), time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, patience / 10))
            if _touched(file) != before:
                return True
    return False


def _touched(file: Path) -> int:
    # The file is opened again each time, since a network file system may otherwise answer from its cache.
    with file.open() as handle:
        return os.fstat(handle.fileno()).st_mtime_ns


def _is_at(file: Path, handle: TextIO) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False

"""How the files of runs are written: whole files, in folders that can be written, by one run at a time."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".grail_lightning.lock"
UNFINISHED = ".unfinished"  # The suffix of a file that is being written.


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path to write to, which becomes `file` when the context ends without an error. Its folder is created."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Processes on several machines may write the file at once.
    unfinished = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}{UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Write a file that appears when it is complete. Its folder is created if it does not exist."""
    with whole_file(file) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def looked_in() -> str:
    """Where a relative path was looked up, for messages about one that does not exist."""
    return f"looked in {Path.cwd()}: paths are relative to the folder in which a run is started, also those in a config"


def check_writable(folder: Path, subject: str) -> None:
    """A `ValueError` about `subject`, an option, if no file can be created in a folder or its nearest parent."""
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{subject} must be a folder that can be written, but got {folder}: {error.strerror} ({place}). "
            "Choose another folder."
        ) from None


_OF_A_RUN = "`trainer.logger.init_args.name`, or `trainer.default_root_dir` without a logger"


@contextmanager
def held(folder: Path, user: str = "fit", option: str = _OF_A_RUN) -> Iterator[None]:
    """Lock a folder, which is created if needed; a `ValueError` if another run, which it calls `user`, has it.

    The error names the `option` by which a run gets another folder. The operating system releases the lock when its
    process ends, for whatever reason; the file stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"A run must have its folder to itself, but {folder} is in use by another {user} ({file.read_text()}). "
            f"Wait for it or stop it{'' if user == 'sweep' else f', or give this run another folder: {option}'}."
        ) from None
    try:
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()

"""Whether files can be written, how they appear, and the space that they have."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def write_whole(file: Path, text: str) -> None:
    """Write a file that appears when it is complete. Its folder is created if it does not exist.

    Args:
        file: The file, which is replaced if it exists.
        text: What it will hold.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Processes on several machines may write the file at once.
    unfinished = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(folder: Path, subject: str) -> None:
    """Write a temporary file to the folder, or to its nearest existing parent, and remove it.

    Args:
        folder: The folder, which need not exist.
        subject: The option that names it, as the message begins with it.

    Raises:
        ValueError: If no file can be created there.
    """
    place = folder
    try:
        place = existing(folder)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{subject} must be a folder that can be written, but got {folder}: {error.strerror} ({place}). "
            "Choose another folder."
        ) from None


def existing(folder: Path) -> Path:
    """The absolute path of a folder, or of its nearest parent that exists."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return place


def in_units(size: int) -> str:
    """A number of bytes with three digits: ``9.67 MiB``; four from 1000 to 1023."""
    unit = next((unit for unit, number in _UNITS.items() if size >= number), "KiB")
    number = size / _UNITS[unit]
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"

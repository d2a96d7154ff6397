"""Whether files can be written, and how they appear."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a file that appears when it is complete. Its folder is created if it does not exist.

    Args:
        file: The file, which is replaced if it exists.
        text: What it will hold.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def check_writable(folder: Path, subject: str) -> None:
    """Write a temporary file to the folder, or to its nearest existing parent, and remove it.

    Args:
        folder: The folder, which need not exist.
        subject: The option that names it, as the message begins with it.

    Raises:
        ValueError: If no file can be created there.
    """
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

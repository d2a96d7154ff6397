"""A check that a run can write to a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path


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

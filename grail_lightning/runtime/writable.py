"""A check that a run can write to a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_writable(folder: Path, option: str) -> None:
    """Write a temporary file to the folder, or to its nearest existing parent, and remove it.

    Args:
        folder: The folder, which need not exist.
        option: The option that names it, for the message.

    Raises:
        ValueError: If no file can be created there.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"`{option}` must be a folder that can be written, but got {folder}: {error.strerror} ({place}). "
            "Choose another folder."
        ) from None

"""Whether a folder that a run is going to write can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_writable(folder: Path, option: str) -> None:
    """Try it out in the folder, or in the nearest one above it that is there; nothing stays behind.

    Args:
        folder: It need not exist.
        option: Which option names it.

    Raises:
        ValueError: If no file can be made there.
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

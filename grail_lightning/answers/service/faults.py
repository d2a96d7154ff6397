"""A bug of a layer, told in one line."""

import traceback
from pathlib import Path

__all__ = ["fault_of"]


def fault_of(error: BaseException) -> str:
    """An exception and where it was raised, short enough for a log.

    Args:
        error: what was caught.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "grail_lightning" in frame.filename] or frames
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {ascii(str(error))[1:-1][:120]}{place}"

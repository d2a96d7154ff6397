"""Which errors are a user's mistakes, and how they are reported: in one line, without a traceback."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from grail_lightning.app.cli.help import refuse
from grail_lightning.app.cli.wrong_options import last_line
from grail_lightning.core.policy.load import other_policy
from grail_lightning.core.runtime.guard import of_a_signal, silent_end, users_place

_PACKAGE = str(Path(__file__).parents[2])
_INTERRUPTED = 130  # The exit code of a process that Ctrl-C has ended.
# Where Lightning and jsonargparse check options; errors from elsewhere in them keep their traceback.
_CONFIG_LIBRARIES = (
    *("jsonargparse", "lightning/pytorch/cli", "lightning/pytorch/loops/fit_loop"),
    *("configuration_validator", "accelerator_connector", "lightning/fabric/accelerators"),
    *("lightning/fabric/utilities/device_parser", "lightning/fabric/utilities/seed"),
    *("lightning/fabric/plugins/environments", "lightning/pytorch/trainer/trainer", "callback_connector"),
)
_MISMATCH = "Error(s) in loading state_dict"
_NOT_LOGGED = "Early stopping conditioned on metric"  # One that only the run could show to be missing.
# Errors of the operating system that the user can correct, wherever they are raised.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


@contextmanager
def mistakes_in_one_line(*files: str) -> Iterator[None]:
    """A context that reports a user's mistake in one line with exit code 2, and ends with 130 after Ctrl-C.

    Checks of the user's input are those of the package, and of these files.
    """
    try:
        yield
    except (ArgumentError, ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as error:
        if not _is_users(error, files):
            raise
        if os.environ.get("GRAIL_DEBUG"):
            traceback.print_exc()
        refuse(f"{_message(error)} (GRAIL_DEBUG=1 shows the traceback)")
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's code after Ctrl-C is 1.
            raise SystemExit(_INTERRUPTED) from None
        if not of_a_signal(end) and users_place(end):  # Of a module that is imported, or of a class that is made.
            refuse(silent_end(end, "Code that options name"))
        raise


def _is_users(error: BaseException, files: Sequence[str] = ()) -> bool:
    """Whether the user can correct an error: one of our own checks, a wrong option, or what a disk refuses.

    A `ValueError` that another library raises is not of this kind and keeps its traceback.
    """
    if isinstance(error, (ArgumentError, MisconfigurationException)) or str(error).startswith((_MISMATCH, _NOT_LOGGED)):
        return True
    if isinstance(error, OSError) and error.errno in _FULL | _REFUSED:
        # An error while a file is written does not name it. Other errors without a file are not about files.
        return error.filename is not None or error.errno in _FULL
    ours = _raised_in(error, (_PACKAGE, *files)) and not isinstance(error, RuntimeError)
    return ours or _raised_in(error, _CONFIG_LIBRARIES)


def _raised_in(error: BaseException, places: Sequence[str]) -> bool:
    """Whether an error was raised in a file whose path has one of these parts."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(place in frames[-1].filename for place in places)


def _message(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        remedy = " Free some space, or choose a folder on another disk." if error.errno in _FULL else ""
        return f"{error.strerror or text}{where}.{remedy}"
    if text.startswith(_MISMATCH):
        differing = [part.partition(":")[0] for part in text.split("size mismatch for ")[1:]]
        return other_policy([*differing, *text.split('"')[1::2]])
    if _raised_in(error, ("jsonargparse",)):  # Its message repeats what a class has raised, for each type of a union.
        return _message(error.__cause__) if error.__cause__ else last_line(error)
    return text

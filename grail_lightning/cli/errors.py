"""Messages of one line about a user's mistake."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from grail_lightning.cli.commands import DEBUG_HINT
from grail_lightning.cli.config_files import file_that_sets
from grail_lightning.cli.option_errors import refusal
from grail_lightning.policy.checks import other_policy

PACKAGE = str(Path(__file__).parents[1])
CONFIG_LIBRARIES = (
    "jsonargparse",
    "lightning/pytorch/cli",
    "configuration_validator",
    "lightning/pytorch/loops/fit_loop",
    "accelerator_connector",
    "lightning/fabric/accelerators",
    "lightning/fabric/utilities/device_parser",
    "lightning/fabric/utilities/seed",
    "lightning/fabric/plugins/environments",
)
MISMATCH = "Error(s) in loading state_dict"
NOT_LOGGED = "Early stopping conditioned on metric"  # One that only the run could show to be missing.
CHOOSE = "Choose another folder."
ROOM = "Free some space, or choose a folder on another disk."
LIMIT = "Raise the limit on the size of files (`ulimit -f`), or choose a folder on another disk."
# Errors of the operating system that the user can correct, wherever they are raised.
REMEDIES = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: LIMIT,
    errno.EROFS: CHOOSE,
    errno.EACCES: CHOOSE,
    errno.EPERM: CHOOSE,
    errno.ENOTDIR: CHOOSE,
}


def explain(error: BaseException) -> bool:
    """Whether the user can correct an error: one of our own checks, a wrong option, or another policy's checkpoint.

    A `ValueError` that another library raises is not of this kind and keeps its traceback.
    """
    if isinstance(error, (ArgumentError, MisconfigurationException)):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith((MISMATCH, NOT_LOGGED)):
        return True
    if isinstance(error, OSError) and error.errno in REMEDIES:
        # An error while a file is written does not name it. Other errors without a file are not about files.
        return error.filename is not None or REMEDIES[error.errno] in (ROOM, LIMIT)
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = frames[-1].filename if frames else ""
    ours = raised_in.startswith(PACKAGE) and not isinstance(error, RuntimeError)
    return ours or any(name in raised_in for name in CONFIG_LIBRARIES)


def option_error(error: ArgumentError, known: Iterable[str], arguments: Sequence[str]) -> str:
    """The message about a wrong option, which names its config file.

    Args:
        error: The error of the parser.
        known: The names of all options of the command line.
        arguments: The arguments of the command line.
    """
    option, said = refusal(str(error), known)
    file = file_that_sets(arguments, option) if option else None
    return said if file is None else f"{said} It is set in {file}."


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    text = str(error)
    if text.startswith(MISMATCH):
        differing = re.findall(r'"([\w.]+)"|size mismatch for ([\w.]+)', text)
        said = other_policy(["".join(names) for names in differing])
    elif isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename}"
        said = f"{error.strerror or error}{where}. {REMEDIES.get(error.errno or 0, '')}".strip()
    else:
        said = refusal(text)[1]
    return f"{said} {DEBUG_HINT}"

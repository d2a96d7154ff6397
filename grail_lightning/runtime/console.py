"""What programs say: command lines beside `grail-lightning`, and messages of libraries on which users cannot act."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of users."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ValueError` instead of printing the usage."""
        raise ValueError(f"{message[:1].upper()}{message[1:]}. See --help.")


def refused(program: str, error: ValueError | OSError, *, choose: str) -> int:
    """Print a user's mistake in one line on stderr, and return its exit code, 2.

    `choose` is what to choose another of if the operating system refuses something: a file, or a folder.
    """
    said = f"{error.filename}: {error.strerror}. Choose another {choose}." if isinstance(error, OSError) else str(error)
    print(f"{program}: error: {' '.join(said.split())}", file=sys.stderr)
    return 2


def leave_out_messages() -> None:
    """Suppress messages of Lightning 2.6 that it has no option to disable; for the command line alone."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_worth_saying)
    for message in (
        "Experiment logs directory .* exists and is not empty",  # `keep_tables` has moved the files.
        "You defined a `validation_step` but have no `val_dataloader`",  # `check_run` says what is lacking.
        r"`ModelCheckpoint\(monitor='val/.*could not find the monitored key",  # The same; other names are an error.
    ):
        warnings.filterwarnings("ignore", message=message)


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("💡 Tip: ", "TPU available: False"))

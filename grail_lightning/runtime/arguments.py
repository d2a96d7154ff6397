"""Command lines of the programs beside `grail-lightning`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of users."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ValueError` instead of printing the usage."""
        raise ValueError(f"{message[:1].upper()}{message[1:]}. See --help.")


def refused(program: str, error: ValueError | OSError, *, choose: str) -> int:
    """Print a user's mistake in one line on stderr, and return its exit code, 2.

    Args:
        program: The name of the program.
        error: The mistake.
        choose: What to choose another of, if the operating system refuses something: a file, or a folder.
    """
    said = f"{error.filename}: {error.strerror}. Choose another {choose}." if isinstance(error, OSError) else str(error)
    print(f"{program}: error: {' '.join(said.split())}", file=sys.stderr)
    return 2

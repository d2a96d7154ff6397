"""Command lines of the programs beside `grail-lightning`."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of users."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ValueError` instead of printing the usage."""
        raise ValueError(f"{message[:1].upper()}{message[1:]}. See --help.")

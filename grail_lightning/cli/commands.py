"""The subcommands of ``grail-lightning`` and the output of a mistake. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

SUBCOMMANDS = ("fit", "validate", "test", "predict")
DEBUG_HINT = "(GRAIL_DEBUG=1 shows the traceback)"


def check_subcommand(arguments: Sequence[str]) -> None:
    """Check that the command line begins with a subcommand or an option.

    Raises:
        ValueError: If it does not.
    """
    given = arguments[0] if arguments else None
    if given is None or not (given.startswith("-") or given in SUBCOMMANDS):
        got = "nothing" if given is None else repr(given)
        raise ValueError(f"`grail-lightning` must be followed by {', '.join(SUBCOMMANDS)} or --help, but got {got}.")


def refuse(message: str) -> NoReturn:
    """Print the user's mistake in one line, and end with exit code 2."""
    print(f"grail-lightning: error: {message}", file=sys.stderr)
    raise SystemExit(2) from None

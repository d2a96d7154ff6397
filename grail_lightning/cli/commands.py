"""The subcommands of ``grail-lightning`` and the output of a mistake. This module does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

SUBCOMMANDS = ("fit", "validate", "test", "predict")
MISTAKE = "grail-lightning: error: "
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


def refuse(message: str, code: int = 2) -> NoReturn:
    """Print the reason for which a run ends in one line, and end with an exit code; 2 is that of a user's mistake."""
    print(f"{MISTAKE}{message}", file=sys.stderr)
    raise SystemExit(code) from None

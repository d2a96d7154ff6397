"""Messages of other libraries that no user can do anything about, left out by their exact beginnings."""

from __future__ import annotations

import logging
import warnings

# An advertisement, and the TPU that almost nobody has; Lightning 2.6 has no switch for either.
LEFT_OUT = ("💡 Tip: ", "TPU available: False")


def leave_out_messages() -> None:
    """Leave out what Lightning says at the start of every run; for the command line alone."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_worth_saying)


def leave_out_leaf_spec() -> None:
    """Leave out that torch 2.13 deprecates `LeafSpec`, of which Lightning 2.6 makes one for every batch."""
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"lightning\.pytorch\."
    )


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LEFT_OUT)

"""Filters for messages of other libraries on which users cannot act, matched by their exact beginnings."""

from __future__ import annotations

import logging
import warnings

# An advertisement, and a message about TPUs. Lightning 2.6 has no option to disable either.
_LEFT_OUT = ("💡 Tip: ", "TPU available: False")


def leave_out_messages() -> None:
    """Suppress Lightning's messages at the start of every run; for the command line alone."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_worth_saying)


def leave_out_leaf_spec() -> None:
    """Suppress torch 2.13's deprecation of `LeafSpec`, which Lightning 2.6 creates for every batch."""
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"lightning\.pytorch\."
    )


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LEFT_OUT)

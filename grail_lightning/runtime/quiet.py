"""Filters for messages of other libraries on which users cannot act, and messages that wait until a run begins."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_WAITS = "Initializing distributed"  # With this message Lightning begins to wait for the other processes.
# An advertisement, and a message about TPUs. Lightning 2.6 has no option to disable either.
_LEFT_OUT = ("💡 Tip: ", "TPU available: False")
# Warnings of Lightning to which users of the command line need no second message.
_KNOWN_ALREADY = (
    "Experiment logs directory .* exists and is not empty",  # `keep_tables` has moved the files.
    "You defined a `validation_step` but have no `val_dataloader`",  # `check_run` says what a run without them lacks.
    r"`ModelCheckpoint\(monitor='val/.*could not find the monitored key",  # The same; other names are checked before.
)


def leave_out_messages() -> None:
    """Suppress messages of Lightning at the start of every run; for the command line alone."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_worth_saying)
    for message in _KNOWN_ALREADY:
        warnings.filterwarnings("ignore", message=message)


def leave_out_leaf_spec() -> None:
    """Suppress torch 2.13's deprecation of `LeafSpec`, which Lightning 2.6 creates for every batch."""
    warnings.filterwarnings(
        "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"lightning\.pytorch\."
    )


class HeldMessages:
    """Log records and warnings that are printed only when the run begins, or after a few seconds.

    A mistake that is found before then is one line; what libraries have said of a run that does not begin would only
    hide it. A run that waits for other processes, or long for its data, still says so.

    Args:
        patience: The seconds after which messages are no longer held.
    """

    def __init__(self, patience: float = 30.0) -> None:
        self.patience = patience
        self._holding = False
        self._waiting: list[Callable[[], Any]] = []

    @contextmanager
    def until_released(self) -> Iterator[None]:
        """Hold all messages that would go to the console until `release`, or until the context is left.

        `SystemExit` with a code other than 0, the end of a mistake, drops them.
        """
        handlers = _console_handlers()
        filters = {handler: partial(self._hold, handler) for handler in handlers}
        show = warnings.showwarning
        for handler, hold in filters.items():
            handler.addFilter(hold)

        def showwarning(*args: Any, **kwargs: Any) -> None:
            if self._holding:
                self._waiting.append(partial(show, *args, **kwargs))
            else:
                show(*args, **kwargs)

        warnings.showwarning = showwarning
        self._holding = True
        timer = threading.Timer(self.patience, self.release)
        timer.daemon = True
        timer.start()
        try:
            yield
        except SystemExit as end:
            if end.code:
                self._waiting.clear()
            raise
        finally:
            timer.cancel()
            self.release()
            for handler, hold in filters.items():
                handler.removeFilter(hold)
            if warnings.showwarning is showwarning:
                warnings.showwarning = show

    def release(self) -> None:
        """Print the messages that were held, and hold no more."""
        self._holding = False
        waiting, self._waiting = self._waiting, []
        for say in waiting:
            say()

    def _hold(self, handler: logging.Handler, record: logging.LogRecord) -> bool:
        if self._holding and record.getMessage().startswith(_WAITS):
            self.release()
        if self._holding:
            self._waiting.append(partial(handler.handle, record))
        return not self._holding


HELD = HeldMessages()


def _console_handlers() -> list[logging.Handler]:
    """The handlers of all loggers that write to the console."""
    loggers = [logging.getLogger(), *(x for x in logging.Logger.manager.loggerDict.values() if hasattr(x, "handlers"))]
    console = (sys.stdout, sys.stderr)
    return [handler for lg in loggers for handler in lg.handlers if getattr(handler, "stream", None) in console]


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_LEFT_OUT)

"""The progress bar."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with reward, accuracy and tokens per second, without the logger's version number.

    Args:
        refresh_rate: Batches between two updates; 0 switches it off.
        leave: Whether the bars of past epochs stay.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._beside = ExitStack()

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """From here on messages stand above the bar."""
        super().setup(trainer, pl_module, stage)
        self._beside.close()
        if self.is_enabled:
            self._beside.enter_context(
                logging_redirect_tqdm(_on_console(["", "lightning.pytorch", "lightning.fabric"]))
            )
            self._beside.enter_context(_warnings_above_bars())

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """The bar is done."""
        self._beside.close()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls no `teardown` then."""
        self._beside.close()
        super().on_exception(trainer, pl_module, exception)

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        """What the bar shows."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

    @property
    def total_train_batches(self) -> int | float:
        """Batches until `max_steps`, which counts optimiser steps, several a batch; else Lightning's own."""
        total: int | float = super().total_train_batches
        execution = getattr(self.trainer.lightning_module, "execution", None)
        if execution is None or self.trainer.max_steps < 0:
            return total
        needed: int = math.ceil(self.trainer.max_steps / execution.steps_per_batch)
        return min(total, needed)


def _on_console(names: list[str]) -> list[logging.Logger]:
    """The loggers that write to the console themselves; the others hand on to those."""
    loggers = [logging.getLogger(name) for name in names]
    console = (sys.stdout, sys.stderr)
    return [lg for lg in loggers if any(getattr(handler, "stream", None) in console for handler in lg.handlers)]


@contextmanager
def _warnings_above_bars() -> Iterator[None]:
    """Clear the bars of tqdm before a warning is shown, and draw them again below it."""
    show = warnings.showwarning

    def above(*args: Any, **kwargs: Any) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            show(*args, **kwargs)

    warnings.showwarning = above
    try:
        yield
    finally:
        if warnings.showwarning is above:
            warnings.showwarning = show

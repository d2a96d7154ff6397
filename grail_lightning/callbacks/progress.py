"""The progress bar of a run."""

from __future__ import annotations

import logging
import math
import re
import sys
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm.contrib.logging import logging_redirect_tqdm

# The groups of what is measured on batches of training, where a bare name is clear.
_GROUP = re.compile(r"^(train|speed)/")


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with reward, accuracy and tokens per second, without the logger's version number.

    Args:
        refresh_rate: The number of batches between two updates; 0 switches the bar off.
        leave: Whether the bars of past epochs stay on the screen.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._redirected = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the bar, and print log messages above it from now on."""
        super().setup(trainer, pl_module, stage)
        self._redirected.close()
        if self.is_enabled:
            loggers = [logging.getLogger(name) for name in ("", "lightning.pytorch", "lightning.fabric")]
            self._redirected.enter_context(logging_redirect_tqdm([each for each in loggers if _on_console(each)]))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore logging."""
        self._redirected.close()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore logging, because Lightning does not call `teardown` after an exception."""
        self._redirected.close()
        super().on_exception(trainer, pl_module, exception)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The metrics that the bar shows, without the groups of their tags."""
        shown = super().get_metrics(trainer, pl_module)
        return {_GROUP.sub("", name): value for name, value in shown.items() if name != "v_num"}

    @property
    def total_train_batches(self) -> int | float:
        """The number of batches until `max_steps` optimiser steps; without `max_steps`, Lightning's own number."""
        total: int | float = super().total_train_batches
        execution = getattr(self.trainer.lightning_module, "execution", None)
        if execution is None or self.trainer.max_steps < 0:
            return total
        needed: int = math.ceil(self.trainer.max_steps / execution.steps_per_batch)
        return min(total, needed)


def _on_console(logger: logging.Logger) -> bool:
    """Whether a logger has a console handler of its own; the others propagate to those that have."""
    return any(getattr(handler, "stream", None) in (sys.stdout, sys.stderr) for handler in logger.handlers)

"""The progress bar of a training run, which counts batches of rollouts."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from grail_lightning.app.callbacks.hooks import module_of


class BatchProgressBar(TQDMProgressBar):
    """Lightning's bar by tqdm, whose total is right where a batch of rollouts takes several optimiser steps.

    While it is open, log records and warnings begin on lines of their own: tqdm takes the bar away for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._redirected = ExitStack()

    @property
    def total_train_batches(self) -> int | float:
        """The batches of an epoch, or those that are left until `max_steps`."""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        steps = module_of(trainer.lightning_module).execution.steps_per_batch
        remaining_batches = math.ceil((trainer.max_steps - trainer.global_step) / steps)
        return min(trainer.num_training_batches, remaining_batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the bar and set its total: Lightning calls no `on_train_epoch_start` in the epoch of a resume."""
        super().on_train_start(trainer, pl_module)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.train_progress_bar.total = convert_inf(min(trainer.num_training_batches, done + self.total_train_batches))
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let tqdm write what loggers and warnings print."""
        super().setup(trainer, pl_module, stage)
        self._redirected.close()
        if self.is_enabled:
            self._redirected.enter_context(logging_redirect_tqdm(_loggers_of_the_terminal()))
            self._redirected.enter_context(_warnings_by_tqdm())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End this."""
        self._redirected.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End this, and close the bars, so that an error begins on a line of its own."""
        self._redirected.close()
        for stage in ("val", "test", "predict", "train"):
            with suppress(TypeError):  # It was not opened.
                getattr(self, f"{stage}_progress_bar").close()


def _loggers_of_the_terminal() -> list[logging.Logger]:
    """The loggers that print. tqdm would give those that do not a handler, too."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return [
        logger
        for logger in loggers
        if isinstance(logger, logging.Logger)
        and any(isinstance(h, logging.StreamHandler) and h.stream in (sys.stdout, sys.stderr) for h in logger.handlers)
    ]


@contextmanager
def _warnings_by_tqdm() -> Iterator[None]:
    """A context in which warnings that are shown are written by tqdm."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        tqdm.write(text, file=file or sys.stderr, end="")

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before

"""Loggers of validation and tests: what those find stays out of the curves of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from grail_lightning.runtime.run_folder import unused


class StageCSVLogger(CSVLogger):
    """Lightning's, with the `sub_dir` that its `TensorBoardLogger` has."""

    def __init__(self, sub_dir: str, **options: Any) -> None:
        super().__init__(**options)
        self.sub_dir = sub_dir

    @property
    def log_dir(self) -> str:
        """A part of the run's folder."""
        return os.path.join(super().log_dir, self.sub_dir)


def beside_training(logger: Logger, given: Any, stage: str) -> Logger:
    """The same logger, writing to a sub-folder of the run's, ``runs/quickstart/validate``.

    TensorBoard shows it as a run of its own, in the same charts. One without a folder stays as it is.

    Args:
        logger: As it was built.
        given: The options it was built from.
        stage: The subcommand.
    """
    if not isinstance(given, Namespace):
        return logger
    options = {**given.init_args.as_dict(), **(given.get("dict_kwargs") or {})}
    if isinstance(logger, TensorBoardLogger) and not options.get("sub_dir", True):
        return type(logger)(**options | {"sub_dir": stage})
    return StageCSVLogger(stage, **options) if type(logger) is CSVLogger else logger


@rank_zero_only
def keep_tables(loggers: list[Logger]) -> None:
    """Move ``metrics.csv`` to a number: Lightning's `CSVLogger` deletes the one that it finds."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (table := Path(logger.log_dir) / "metrics.csv").exists():
            table.rename(unused(table))

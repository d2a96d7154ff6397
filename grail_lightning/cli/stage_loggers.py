"""Loggers of validation and tests, whose metrics are kept apart from the curves of training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from grail_lightning.cli.run_config import SaveRunConfig
from grail_lightning.runtime.run_folder import unused


class StageCSVLogger(CSVLogger):
    """Lightning's `CSVLogger` with a `sub_dir`, which its `TensorBoardLogger` already has."""

    def __init__(self, sub_dir: str, **options: Any) -> None:
        super().__init__(**options)
        self.sub_dir = sub_dir

    @property
    def log_dir(self) -> str:
        """The sub-folder of the run's folder."""
        return os.path.join(super().log_dir, self.sub_dir)


def beside_training(logger: Logger, given: object, stage: str) -> Logger:
    """The same logger, writing to a sub-folder of the run's, ``runs/quickstart/validate``.

    TensorBoard shows it as a separate run in the same charts. A logger without a folder is returned unchanged.

    Args:
        logger: The logger of the run.
        given: The options from which it was built.
        stage: The subcommand.
    """
    if not isinstance(given, Namespace):
        return logger
    options = {**given.init_args.as_dict(), **(given.get("dict_kwargs") or {})}
    if isinstance(logger, TensorBoardLogger) and not options.get("sub_dir", True):
        return type(logger)(**options | {"sub_dir": stage})
    return StageCSVLogger(stage, **options) if type(logger) is CSVLogger else logger


@contextmanager
def files_after_checks(trainer: Trainer, folder: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A context for a run that takes its folder, and opens the files of its loggers, when all checks have passed.

    A run that is refused leaves the disk as it was. Lightning opens the files before it calls any check.

    Args:
        trainer: The Trainer, with the callback `SaveRunConfig`; without it (`fast_dev_run`) there are no files.
        folder: A function that makes the context in which the folder is the run's.
    """
    writers: list[Any] = [each for each in trainer.loggers if isinstance(each, (CSVLogger, TensorBoardLogger))]
    with ExitStack() as held:

        def begin() -> None:
            held.enter_context(folder())
            keep_tables(trainer.loggers)
            for writer in writers:
                writer._experiment = None
                _ = writer.experiment

        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveRunConfig):
                callback.begin = begin
                for writer in writers:
                    writer._experiment = _DummyExperiment()
        yield


@rank_zero_only
def keep_tables(loggers: list[Logger]) -> None:
    """Rename an existing ``metrics.csv`` to a numbered file, because Lightning's `CSVLogger` would delete it."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (table := Path(logger.log_dir) / "metrics.csv").exists():
            table.rename(unused(table))

"""The files of a run beside its checkpoints: the resolved config, and those of its loggers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from grail_lightning.evaluate.records import flat
from grail_lightning.runtime.run_folder import RunFolder, unused


class SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config with the run, in one file for each subcommand.

    An earlier file with other options is kept under a number. A resumed run replaces the config only after its
    checkpoint has been loaded.
    """

    begin: Callable[[], None] | None = None
    """Called first in `setup`, which runs after that of all callbacks that check something."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the config, except in a resumed fit. Lightning calls this for every stage."""
        if self.begin is not None:
            self.begin()
        name = "config.yaml" if stage == "fit" else f"config_{TrainerFn(stage).value}.yaml"
        self._file = RunFolder(trainer).path / name
        if stage != "fit" or self.config.get("ckpt_path") is None:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the config of a resumed run, and report the options that have changed."""
        if not self.already_saved:
            tell_changes(self._file, yaml.safe_load(self.parser.dump(self.config)))
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file. Lightning calls this on the first rank."""
        text = self.parser.dump(self.config, skip_none=False)
        if stage != "fit" and self._file.exists() and self._file.read_text() != text:
            shutil.copy(self._file, unused(self._file))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(text)


@rank_zero_only
def tell_changes(saved: Path, options: dict[str, Any]) -> None:
    """Log the options that differ from those of the saved file, and keep that file under a number."""
    if not saved.is_file():
        return
    before, after = (dict(flat(tree)) for tree in (yaml.safe_load(saved.read_text()), options))
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    changed = [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if not name.startswith("ckpt_path")]
    if changed:
        earlier = unused(saved)
        shutil.copy(saved, earlier)
        rank_zero_info(f"Resuming with other options than {earlier}: {'; '.join(changed)}")


class StageCSVLogger(CSVLogger):
    """Lightning's `CSVLogger` with a `sub_dir`, which its `TensorBoardLogger` already has."""

    def __init__(self, sub_dir: str, **options: Any) -> None:
        super().__init__(**options)
        self.sub_dir = sub_dir

    @property
    def log_dir(self) -> str:
        """The sub-folder of the run's folder."""
        return os.path.join(super().log_dir, self.sub_dir)


def beside_training(logger: Logger, options: object, stage: str) -> Logger:
    """The logger, writing to a sub-folder of the run's, ``runs/quickstart/validate``, apart from training's curves.

    A logger without a folder is returned unchanged.

    Args:
        logger: The logger of the run.
        options: The options from which it was built.
        stage: The subcommand.
    """
    if not isinstance(options, Namespace):
        return logger
    arguments = {**options.init_args.as_dict(), **(options.get("dict_kwargs") or {})}
    if isinstance(logger, TensorBoardLogger) and not arguments.get("sub_dir", True):
        return type(logger)(**arguments | {"sub_dir": stage})
    return StageCSVLogger(stage, **arguments) if type(logger) is CSVLogger else logger


class _TableToCome(CSVLogger):
    """Stands for a logger until all checks have passed: the same folder, and no files."""

    experiment = None


class _EventsToCome(TensorBoardLogger):
    """The same for TensorBoard."""

    experiment = None


def _to_come(logger: Logger) -> Logger:
    if isinstance(logger, TensorBoardLogger):
        return _EventsToCome(logger.save_dir, logger.name, logger.version, sub_dir=logger.sub_dir)
    return _TableToCome(logger.save_dir, logger.name, logger.version) if isinstance(logger, CSVLogger) else logger


@contextmanager
def files_after_checks(trainer: Trainer, folder: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A context for a run that takes its folder, and opens the files of its loggers, when all checks have passed.

    A run that is refused leaves the disk as it was. Lightning opens the files before it calls any check.

    Args:
        trainer: The Trainer, with the callback `SaveRunConfig`; without it (`fast_dev_run`) there are no files.
        folder: A function that makes the context in which the folder is the run's.
    """
    loggers = trainer.loggers
    with ExitStack() as held:

        def begin() -> None:
            trainer.loggers = loggers
            held.enter_context(folder())
            keep_tables(loggers)
            for logger in loggers:
                _ = getattr(logger, "experiment", None)

        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveRunConfig):
                callback.begin = begin
                trainer.loggers = [_to_come(logger) for logger in loggers]
        yield


@rank_zero_only
def keep_tables(loggers: list[Logger]) -> None:
    """Rename an existing ``metrics.csv`` to a numbered file, because Lightning's `CSVLogger` would delete it."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (table := Path(logger.log_dir) / "metrics.csv").exists():
            table.rename(unused(table))

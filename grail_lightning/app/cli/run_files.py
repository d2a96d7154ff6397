"""The files of a run beside its checkpoints: the resolved config, and the tables of its loggers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.app.results.records import flat, unequal
from grail_lightning.core.runtime.files import write_whole
from grail_lightning.core.runtime.run_folder import RunFolder, unused


class SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config with the run, in one file for each subcommand.

    An earlier file with other options is kept under a number. A resumed run replaces the config only after its
    checkpoint has been loaded.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the config, except in a resumed fit. Lightning calls this for every stage."""
        name = "config.yaml" if stage == "fit" else f"config_{TrainerFn(stage).value}.yaml"
        self._file = RunFolder(trainer).path / name
        if stage != "fit" or self.config.get("ckpt_path") is None:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the config of a resumed run."""
        if not self.already_saved:
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file, and report the options that differ from those of an earlier one. For the first rank."""
        text = self.parser.dump(self.config, skip_none=False)
        if self._file.is_file():
            before, after = (dict(flat(yaml.safe_load(t) or {})) for t in (self._file.read_text("utf-8"), text))
            changed = unequal(before, after)
            if stage == "fit":  # The same run goes on. Evaluations of two checkpoints are two.
                changed.pop("ckpt_path", None)
            if changed:
                earlier = unused(self._file)
                shutil.copy(self._file, earlier)
                told = "; ".join(f"{name}: {before.get(name)} -> {after.get(name)}" for name in changed)
                rank_zero_info(f"Other options than {earlier}: {told}")
        write_whole(self._file, text)
        for logger in trainer.loggers if stage == "fit" else ():
            if not isinstance(logger, TensorBoardLogger):  # Those of services show the options beside the curves.
                logger.log_hyperparams(yaml.safe_load(text))


@contextmanager
def keep_tables(trainer: Trainer) -> Iterator[None]:
    """A context in which an existing ``metrics.csv`` has a number, because Lightning's `CSVLogger` would delete it.

    It gets its name back if the context ends with an error before there is a new one.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger) and trainer.is_global_zero]
    tables = [Path(logger.log_dir) / "metrics.csv" for logger in loggers]
    renamed = {table: table.rename(unused(table)) for table in tables if table.exists()}
    try:
        yield
    except BaseException:
        for table, earlier in renamed.items():
            if not table.exists():
                earlier.rename(table)
        raise

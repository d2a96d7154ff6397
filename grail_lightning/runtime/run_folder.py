"""The one folder of a run: where its checkpoints, events, tables and export are."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning._version import __version__
from grail_lightning.runtime.folder_lock import LOCK, held

KEYWORDS = ("last", "best")
MARKER = "grail_lightning.json"
RUN = ("config.yaml", "checkpoints")
# What a run would write over, or into. Files of events have names of their own.
WRITTEN = (*RUN, "export", "rollouts", "metrics.csv", "hparams.yaml")


@dataclass(frozen=True)
class RunFolder:
    """Finds things in the run's folder, and keeps it for one run.

    The folder is that of the first logger that has one (TensorBoard's, CSV); else a folder of the logger's name in its
    `save_dir`; without a logger the Trainer's `default_root_dir`, or ``runs/unnamed`` where that is the working folder:
    files of a run never lie among those of a project.

    A folder that was made for a run carries the file ``grail_lightning.json``. No other folder is ever moved.

    Attributes:
        trainer: A Lightning `Trainer`.
    """

    trainer: Any

    @property
    def path(self) -> Path:
        """The folder; it need not exist yet. A broadcast: every rank has to ask for it."""
        return Path(self.trainer.strategy.broadcast(str(_folder(self.trainer))))

    def checkpoint(self, wanted: str | None) -> str | None:
        """The checkpoint file that `last`, `best` or a path stands for; None stays None.

        Raises:
            ValueError: If there is none. Lightning would go on with an untrained policy.
        """
        if wanted is None:
            return None
        file = self.path / "checkpoints" / f"{wanted}.ckpt" if wanted in KEYWORDS else Path(wanted)
        if not file.exists():
            there = sorted(str(f) for f in (self.path / "checkpoints").glob("*.ckpt"))
            listed = f"there are {', '.join(there)}" if there else f"{self.path / 'checkpoints'} holds none"
            raise ValueError(
                f"`ckpt_path` {wanted!r} must be last, best or a file, but {file} does not exist ({listed}). "
                "Train first with the same `trainer.logger`, or give the file."
            )
        if file.is_dir() and not isinstance(self.trainer.strategy, ModelParallelStrategy):
            raise ValueError(
                f"`ckpt_path` {file} must be one file here, but got a folder of shards. Use the strategy that saved "
                f"it, or run `python -m lightning.pytorch.utilities.consolidate_checkpoint {file}`."
            )
        return str(file)

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """An empty folder for a new run: an earlier run is moved aside, and moved back if the new one never began.

        Raises:
            ValueError: If another fit is using the folder, or it holds files that may not be a run's.
        """
        folder = self.path
        _check_ours(folder)
        if not self.trainer.is_global_zero:
            yield
            return
        with held(folder):
            aside = _move_aside(folder) if any((folder / name).exists() for name in RUN) else None
        with held(folder):
            _mark_if_new(folder)
            try:
                yield
            except Exception:
                if aside is not None and self.trainer.global_step == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                    aside.rename(folder)
                    rank_zero_info(f"The run did not begin; the earlier one is back in {folder}.")
                raise

    @contextmanager
    def resumed(self, checkpoint: str) -> Iterator[None]:
        """The folder of a run that goes on.

        Raises:
            ValueError: If another fit is using the folder, or it holds files that may not be a run's.
        """
        folder = self.path
        if not Path(checkpoint).resolve().is_relative_to(folder.resolve()):
            _check_ours(folder)
        if not self.trainer.is_global_zero:
            yield
            return
        with held(folder):
            _mark_if_new(folder)
            yield

    def shared(self) -> None:
        """The folder for what only looks at a policy: made if need be, and not held. A fit may be using it."""
        folder = self.path
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            _mark_if_new(folder)


def unused(path: Path) -> Path:
    """The path itself if nothing lies there; else the first free one with a number, as ``predictions.1.parquet``."""
    if not path.exists():
        return path
    name, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{name}.{number}{suffix}") for number in itertools.count(1))
    return next(file for file in numbered if not file.exists())


def _folder(trainer: Any) -> Path:
    loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
    root = Path(trainer.default_root_dir)
    for logger in loggers:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            # Not `log_dir`, which may be a sub-folder of it.
            return Path(os.path.expanduser(os.path.expandvars(os.path.join(logger.root_dir, version))))
    if loggers:
        return Path(loggers[0].save_dir or root) / str(loggers[0].name or type(loggers[0]).__name__)
    return root / "runs" / "unnamed" if root.resolve() == Path.cwd() else root


def _check_ours(folder: Path) -> None:
    there = [name for name in WRITTEN if (folder / name).exists()]
    if there and not (folder / MARKER).exists():
        raise ValueError(
            f"The folder of a run must be new or an earlier run's, but {folder} holds {', '.join(there)} and no "
            f"{MARKER}, which each run leaves in its folder. It was left alone. Rename it, or give this run another: "
            "`trainer.logger.init_args.name`, or `trainer.default_root_dir` without a logger. If it is a run of an "
            f"older version: `touch {folder / MARKER}`."
        )


def _mark_if_new(folder: Path) -> None:
    """A folder that held files of others before stays unmarked, hence where it is."""
    if all(entry.name == LOCK for entry in folder.iterdir()):
        created = datetime.now().astimezone().isoformat(timespec="seconds")
        (folder / MARKER).write_text(json.dumps({"grail_lightning": __version__, "created": created}) + "\n")


def _move_aside(folder: Path) -> Path:
    """Where an earlier run now is."""
    aside = unused(folder)
    folder.rename(aside)
    (aside / LOCK).unlink()
    rank_zero_info(f"{folder} held an earlier run, which is now in {aside}.")
    return aside

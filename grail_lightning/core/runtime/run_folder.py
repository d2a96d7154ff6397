"""The folder of a run, which contains its checkpoints, events, tables and export."""

from __future__ import annotations

import inspect
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

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning._version import __version__
from grail_lightning.core.runtime.files import LOCK, held, looked_in

MARKER = "grail_lightning.json"
"""The file by which a folder is known as one that was created for a run. No other folder is ever moved."""
_RUN = ("config.yaml", "checkpoints")
_WRITTEN = (*_RUN, "export", "rollouts", "metrics.csv")  # What a run would overwrite or append to.


@dataclass(frozen=True)
class RunFolder:
    """The run's folder, and files in it.

    The folder is that of the first logger that has one (TensorBoard, CSV); else a folder of the logger's name in its
    `save_dir`. Without a logger it is the Trainer's `default_root_dir`, or ``runs/unnamed`` if that is the working
    folder, so that a run's files are never mixed with those of a project.
    """

    trainer: Trainer

    @property
    def path(self) -> Path:
        """The folder, which may not exist yet. A broadcast: every rank must call it."""
        return Path(self.trainer.strategy.broadcast(str(_folder(self.trainer))))

    def checkpoint(self, wanted: str | None) -> str | None:
        """The file for `last`, `best` or a path. Without one Lightning would take an untrained policy."""
        if wanted is None:
            return None
        file = self.path / "checkpoints" / f"{wanted}.ckpt" if wanted in ("last", "best") else Path(wanted)
        if not file.exists():
            there = sorted(str(f) for f in (self.path / "checkpoints").glob("*.ckpt"))
            listed = f"there are {', '.join(there)}" if there else f"{self.path / 'checkpoints'} holds none"
            raise ValueError(
                f"`ckpt_path` {wanted!r} must be last, best or a file, but {file} does not exist ({listed}). "
                f"Train first with the same `trainer.logger`, or give the file ({looked_in()})."
            )
        return str(file)

    @contextmanager
    def taken(self, checkpoint: str | None = None) -> Iterator[None]:
        """The folder of a `fit` for itself alone: that of the checkpoint's run, or an empty one.

        For a new run, and for one from the checkpoint of another run, an earlier one is moved aside. Lightning opens
        the files of loggers before it calls any check, so a run takes its folder before all of them. After an error
        before the first step the earlier run comes back, and the files of the other are removed. A `ValueError` if
        another fit is using the folder, or it holds files that may not be a run's.
        """
        folder = self.path
        if checkpoint is None or not Path(checkpoint).resolve().is_relative_to(folder.resolve()):
            _check_ours(folder)
        of_another = checkpoint is not None and not self._is_own(Path(checkpoint), folder)
        if not self.trainer.is_global_zero:
            yield
            return
        aside = None
        with held(folder):
            if (checkpoint is None or of_another) and any((folder / name).exists() for name in _RUN):
                aside = unused(folder)
                folder.rename(aside)
                (aside / LOCK).unlink()
                rank_zero_info(f"{folder} held an earlier run, which is now in {aside}.")
        with held(folder):
            mark_if_new(folder)
            try:
                yield
            except Exception:
                if aside is not None and self.trainer.global_step == 0:
                    shutil.rmtree(folder)
                    aside.rename(folder)
                    rank_zero_info(f"Nothing was trained, and {folder} holds the earlier run again.")
                raise

    def _is_own(self, checkpoint: Path, folder: Path) -> bool:
        """Whether a checkpoint is in the run's folder, perhaps as a link, or in a folder of one of its callbacks."""
        if any(path.is_relative_to(folder.resolve()) for path in (checkpoint.absolute(), checkpoint.resolve())):
            return True
        callbacks: list[Any] = [*self.trainer.checkpoint_callbacks]
        places = (getattr(callback, "folder", None) or getattr(callback, "dirpath", None) for callback in callbacks)
        return checkpoint.resolve().parent in [Path(place).resolve() for place in places if place]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The folder for commands that do not train. It is created if needed, and not locked: a fit may be using it."""
        folder = self.path
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            mark_if_new(folder)
        yield


def _check_ours(folder: Path) -> None:
    marked = (folder / MARKER).exists()  # Asked first: the first rank may be moving an earlier run aside.
    there = [name for name in _WRITTEN if (folder / name).exists()]
    if there and not marked:
        raise ValueError(
            f"The folder of a run must be new or an earlier run's, but {folder} holds {', '.join(there)} and no "
            f"{MARKER}, which each run leaves in its folder. It was left alone. Rename it, or give this run another: "
            "`trainer.logger.init_args.name`, or `trainer.default_root_dir` without a logger. If it is a run of an "
            f"older version: `touch {folder / MARKER}`."
        )


def mark_if_new(folder: Path) -> None:
    """Write the marker file into a new folder. A folder with other files gets none, so it is never moved."""
    if all(entry.name == LOCK for entry in folder.iterdir()):
        created = datetime.now().astimezone().isoformat(timespec="seconds")
        (folder / MARKER).write_text(json.dumps({"grail_lightning": __version__, "created": created}) + "\n")


def check_last_found(trainer: Trainer) -> None:
    """Refuse a `ckpt_path="last"` that found no checkpoint: Lightning warns, and trains anew."""
    # Lightning keeps only what it has found. What was asked for is an argument of the method that is running.
    paths, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == Trainer.__module__ and "ckpt_path" in frame.f_locals:
            paths.append(frame.f_locals["ckpt_path"])
        frame = frame.f_back
    if paths and paths[0] is None and paths[-1] == "last":
        raise ValueError(
            '`ckpt_path="last"` must find a checkpoint, but no callback of the trainer has one in its folder, and '
            f"that of the run is {RunFolder(trainer).path}. Give the file, or a logger with the `version` of the "
            "earlier run; or leave `ckpt_path` out for a new one."
        )


def unused(path: Path) -> Path:
    """The path itself if it does not exist; else the first free one with a number, as ``predictions.1.parquet``."""
    if not path.exists():
        return path
    name, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{name}.{number}{suffix}") for number in itertools.count(1))
    return next(file for file in numbered if not file.exists())


def _folder(trainer: Trainer) -> Path:
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

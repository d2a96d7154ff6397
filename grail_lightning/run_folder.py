"""The one folder of a run: where its checkpoints, events, tables and export are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

KEYWORDS = ("last", "best")


@dataclass(frozen=True)
class RunFolder:
    """Finds things in the run's folder: the logger's, or else the trainer's root.

    Attributes:
        trainer: A Lightning `Trainer`.
    """

    trainer: Any

    @property
    def path(self) -> Path:
        """The folder; it need not exist yet."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

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
        """An empty folder for a new run: what was there is moved aside, and moved back if the run never began."""
        folder = self.path  # A broadcast: every rank asks for it.
        aside = _move_aside(folder) if self.trainer.is_global_zero else None
        try:
            yield
        except Exception:
            if aside is not None and self.trainer.global_step == 0:
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)
                rank_zero_info(f"The run did not begin; the earlier one is back in {folder}.")
            raise


def _move_aside(folder: Path) -> Path | None:
    """Where an earlier run now is; None if there was none."""
    if not (folder / "config.yaml").exists() and not (folder / "checkpoints").exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    rank_zero_info(f"{folder} held an earlier run, which is now in {aside}.")
    return aside

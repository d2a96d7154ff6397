"""The one folder of a run: where its checkpoints, events, tables and export are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

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

    def make_room(self) -> None:
        """Move an earlier run out of the folder, so that a new one does not mix with it and nothing is lost."""
        _move_aside(self.path)  # The path is a broadcast: every rank asks for it.


@rank_zero_only
def _move_aside(folder: Path) -> None:
    if not (folder / "config.yaml").exists() and not (folder / "checkpoints").exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    rank_zero_info(f"{folder} held an earlier run, which is now in {aside}.")

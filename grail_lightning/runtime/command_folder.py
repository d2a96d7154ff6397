"""Takes the folder of a run for it: an earlier run's is moved aside, and only a folder that runs made is moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from grail_lightning._version import __version__
from grail_lightning.runtime.files import LOCK, held
from grail_lightning.runtime.run_folder import RunFolder, unused

MARKER = "grail_lightning.json"
_RUN = ("config.yaml", "checkpoints")
# The files that a run would overwrite or append to. Event files have unique names.
_WRITTEN = (*_RUN, "export", "rollouts", "metrics.csv", "hparams.yaml")
_OPENED = (MARKER, LOCK, "config.yaml", "hparams.yaml", "events.out.tfevents.*")  # Before any check of a run.


@dataclass(frozen=True)
class CommandFolder(RunFolder):
    """The run's folder as a command takes it: `fit` for itself alone, the others beside a fit.

    A folder that was created for a run contains the file ``grail_lightning.json``. No other folder is ever moved.

    Its methods raise a `ValueError` if another fit is using the folder, or it holds files that may not be a run's.
    """

    @contextmanager
    def taken(self, checkpoint: str | None = None) -> Iterator[None]:
        """The folder of a fit: that of the checkpoint's run, or an empty one.

        For a new run an earlier one is moved aside, and back if the new one does not begin. Lightning opens the files
        of loggers before it calls any check, so a run takes its folder before all of them.
        """
        folder = self.path
        if checkpoint is None or not Path(checkpoint).resolve().is_relative_to(folder.resolve()):
            _check_ours(folder)
        if not self.trainer.is_global_zero:
            yield
            return
        aside = None
        with held(folder):
            if checkpoint is None and any((folder / name).exists() for name in _RUN):
                aside = unused(folder)
                folder.rename(aside)
                (aside / LOCK).unlink()
                rank_zero_info(f"{folder} held an earlier run, which is now in {aside}.")
        with held(folder):
            mark_if_new(folder)
            try:
                yield
            except Exception:
                # Under `ddp_fork` and `ddp_spawn` this process counts no steps, whatever its children have trained.
                began = self.trainer.global_step > 0 or any((folder / "checkpoints").glob("*"))
                if aside is not None and not began:
                    _put_back(aside, folder)
                raise

    def shared(self) -> None:
        """The folder for commands that do not train. It is created if needed, and not locked: a fit may be using it."""
        folder = self.path
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            mark_if_new(folder)


def _put_back(earlier: Path, folder: Path) -> None:
    """Give an earlier run its folder again. What a run that failed has left there is kept, unless it is only logs."""
    refused = unused(folder)
    folder.rename(refused)
    earlier.rename(folder)
    left = sorted(refused.rglob("*"), reverse=True)  # Those in a folder stand before it.
    if all(entry.is_dir() or any(map(entry.match, _OPENED)) for entry in left):
        with suppress(OSError):  # Another process may have one of them open on a network disk.
            for entry in (*left, refused):
                entry.rmdir() if entry.is_dir() else entry.unlink()
    kept = f" What the new one left is in {refused}." if refused.exists() else ""
    rank_zero_info(f"The run did not begin; the earlier one is back in {folder}.{kept}")


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

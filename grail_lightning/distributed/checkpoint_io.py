"""Checkpoints that are whole: written so that a killed run tears none, and a damaged one says so when it is read."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

PART = ".part"  # Of a checkpoint that is being written, behind its name.


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but a local file is replaced by a whole one at once, and tensors are read to the host by name.

    Lightning collects the file in memory, writes it to the folder for temporary files and moves it. On another file
    system that is a copy over the old checkpoint: a run that was killed meanwhile had neither.

    Lightning gives `torch.load` a function for the host, which torch does not take for tensors that are made of others
    (`torch._utils._rebuild_wrapper_subclass`): torchao's 8-bit state. For all others both do the same.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write to a name beside `path`, and give it that name when all of it is on the disk.

        Raises:
            OSError: If it cannot be written. What was there before still is.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        part = target.with_name(target.name + PART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except (OSError, RuntimeError) as error:  # torch.save hides the reason in a RuntimeError.
            raise OSError(
                f"`{target}` could not be written: {_reason(error)}. What was there before is as it was: make room, "
                "and go on from the last checkpoint."
            ) from error
        finally:
            part.unlink(missing_ok=True)
        _to_disk(target.parent)

    def load_checkpoint(
        self, path: _PATH, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, on the host, wherever it was saved from.

        Raises:
            ValueError: If the file is damaged.
        """
        host: Any = "cpu"
        try:
            found: dict[str, Any] = super().load_checkpoint(path, host, weights_only)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            if not Path(path).is_file() or is_whole(Path(path)):
                raise
            raise _damaged(Path(path)) from error
        return found


def save_whole(trainer: Any, target: Path) -> None:
    """Save a run's checkpoint; a folder of shards, too, is written beside its place. A collective.

    A folder cannot replace another at once. Between the two steps that it takes the earlier one is ``old-last.ckpt``.
    """
    if not getattr(trainer.strategy, "_save_distributed_checkpoint", False):
        trainer.save_checkpoint(target, weights_only=False)  # Else Lightning remarks on it each time.
        return
    part, old = target.with_name(target.name + PART), target.with_name(f"old-{target.name}")
    if trainer.is_global_zero:
        _remove(part)
    trainer.strategy.barrier()
    trainer.save_checkpoint(part, weights_only=False)
    if trainer.is_global_zero:
        _remove(old)
        if target.exists():
            target.rename(old)
        part.rename(target)
        _remove(old)
    trainer.strategy.barrier()


def check_whole(path: str | None) -> None:
    """Look at a local checkpoint without reading it: one whose end is missing is found before a model is loaded.

    Raises:
        ValueError: If it is damaged.
    """
    file = Path(path or "")
    if file.is_file():
        with file.open("rb") as opened:
            start = opened.read(2)
        if not start or (start == b"PK" and not zipfile.is_zipfile(file)):  # Its directory stands at the end.
            raise _damaged(file)


def is_whole(file: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written; reads all of it."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, zipfile.BadZipFile):
        return False


def remove_parts(folder: Path) -> None:
    """Remove what runs that were killed in the middle of writing have left in a folder of checkpoints."""
    for part in folder.glob(f"*.ckpt{PART}"):
        _remove(part)


def _remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _damaged(file: Path) -> ValueError:
    whole = [other for other in file.parent.glob("*.ckpt") if other != file and other.is_file() and is_whole(other)]
    newest = max(whole, key=lambda other: other.stat().st_mtime, default=None)
    instead = "no other in its folder is whole: begin anew"
    if newest is not None:
        instead = f"the newest whole one in its folder is {newest}{_step(newest)}: give that"
    return ValueError(f"`ckpt_path` must be a whole checkpoint, but got {file}, which is damaged; {instead}.")


def _step(file: Path) -> str:
    """Of which optimiser step a whole checkpoint is, as far as that can be told without reading its tensors."""
    with contextlib.suppress(RuntimeError, KeyError, pickle.UnpicklingError):
        return f" (step {torch.load(file, map_location='meta', weights_only=True)['global_step']})"
    return ""


def _reason(error: BaseException) -> str:
    """The system's own word, which torch puts behind a message about its file format."""
    found = error.__context__ if isinstance(error.__context__, OSError) else error
    return found.strerror or str(found) if isinstance(found, OSError) else str(found)


def _to_disk(folder: Path) -> None:
    """Have a folder's names written out, where the file system takes such a request."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

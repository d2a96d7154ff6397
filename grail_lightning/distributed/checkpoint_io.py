"""Checkpoint files: a killed run leaves no incomplete file, and a damaged file is reported when it is read."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer

_PART = ".part"  # The suffix of a checkpoint that is being written.


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, except that a local file is replaced atomically and tensors are loaded to "cpu".

    Lightning collects the file in memory, writes it to the folder for temporary files and moves it. On another file
    system the move is a copy over the old checkpoint, so that a run killed during the copy has neither checkpoint.

    Lightning passes `torch.load` a function as `map_location`. torch does not accept one for tensor subclasses
    (`torch._utils._rebuild_wrapper_subclass`), such as torchao's 8-bit state. For other tensors the result is equal.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: object | None = None) -> None:
        """Write to a temporary name beside `path`, and rename the file when all of it is on the disk.

        Raises:
            OSError: If it cannot be written. An earlier checkpoint at `path` is then unchanged.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        part = target.with_name(target.name + _PART)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except (OSError, RuntimeError) as error:  # torch.save hides the reason in a RuntimeError.
            said = "A checkpoint could not be written, and an earlier one of this name is unchanged"
            number, reason = _cause(error)
            raise OSError(number, f"{said}: {reason}", str(target)) from error
        finally:
            part.unlink(missing_ok=True)
        _to_disk(target.parent)

    def load_checkpoint(
        self, path: _PATH, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, with its tensors on the CPU, whatever device they were saved from.

        Raises:
            ValueError: If the file is damaged.
        """
        host: Any = "cpu"
        try:
            found: dict[str, Any] = super().load_checkpoint(path, host, weights_only)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            if not Path(path).is_file() or _is_whole(Path(path)):
                raise
            raise damaged(Path(path)) from error
        return found


def save_whole(trainer: Trainer, target: Path) -> None:
    """Save a run's checkpoint; a folder of shards, too, is first written under a temporary name. A collective.

    One folder cannot replace another atomically. Between the two renames the earlier one is ``old-last.ckpt``.
    """
    if not getattr(trainer.strategy, "_save_distributed_checkpoint", False):
        trainer.save_checkpoint(target, weights_only=False)  # Without the argument Lightning warns each time.
        return
    part, old = target.with_name(target.name + _PART), target.with_name(f"old-{target.name}")
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
    """Check that a local checkpoint has its end, without reading all of it, before a model is loaded.

    Raises:
        ValueError: If it is damaged.
    """
    file = Path(path or "")
    if file.is_file():
        with file.open("rb") as opened:
            start = opened.read(2)
        if not start or (start == b"PK" and not zipfile.is_zipfile(file)):  # The directory of a zip file is at its end.
            raise damaged(file)


def _is_whole(file: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written; reads the whole file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, zipfile.BadZipFile):
        return False


def remove_parts(folder: Path) -> None:
    """Remove the incomplete files in a folder of checkpoints that were left by killed runs."""
    for part in folder.glob(f"*.ckpt{_PART}"):
        _remove(part)


def _remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def damaged(path: Path) -> ValueError:
    """The error about a checkpoint that is not as it was written. It names the newest whole one in the same folder."""
    whole = [other for other in path.parent.glob("*.ckpt") if other != path and other.is_file() and _is_whole(other)]
    newest = max(whole, key=lambda other: other.stat().st_mtime, default=None)
    instead = "no other in its folder is whole: begin anew"
    if newest is not None:
        instead = f"the newest whole one in its folder is {newest}{_step(newest)}: give that"
    return ValueError(f"`ckpt_path` must be a whole checkpoint, but got {path}, which is damaged; {instead}.")


def _step(file: Path) -> str:
    """The optimiser step of a checkpoint, in words; empty if it cannot be read without reading the tensors."""
    with contextlib.suppress(RuntimeError, LookupError, TypeError, pickle.UnpicklingError):
        return f" (step {torch.load(file, map_location='meta', weights_only=True)['global_step']})"
    return ""


def _cause(error: BaseException) -> tuple[int, str]:
    """The operating system's error number and message. torch hides them behind an error about its file format."""
    found = error.__context__ if isinstance(error.__context__, OSError) else error
    if isinstance(found, OSError) and found.errno is not None:
        return found.errno, found.strerror or str(found)
    return errno.EIO, str(found)


def _to_disk(folder: Path) -> None:
    """Flush a folder's directory entries to the disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

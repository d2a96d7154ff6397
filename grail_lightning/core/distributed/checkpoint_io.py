"""Checkpoint files: a killed run leaves no incomplete file, and what is no checkpoint is refused in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from grail_lightning.core.policy.source import first_line
from grail_lightning.core.runtime.files import UNFINISHED, whole_file

_PART = ".part"  # The suffix of a folder of shards that is being written.


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, except that a local file is replaced atomically and tensors are loaded to "cpu".

    Lightning collects the file in memory, writes it to the folder for temporary files and moves it. On another file
    system the move is a copy over the old checkpoint, so that a run killed during the copy has neither checkpoint.

    Lightning passes `torch.load` a function as `map_location`. torch does not accept one for tensor subclasses
    (`torch._utils._rebuild_wrapper_subclass`), such as torchao's 8-bit state. For other tensors the result is equal.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: object | None = None
    ) -> None:
        """Write to a temporary name beside `path`, and rename the file when all of it is on the disk."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with whole_file(Path(path)) as part, part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            # torch hides the operating system's error behind a RuntimeError about its file format.
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            number, text = getattr(reason, "errno", None) or errno.EIO, getattr(reason, "strerror", None) or reason
            message = f"A checkpoint could not be written, and an earlier one of this name is unchanged: {text}"
            raise OSError(number, message, str(path)) from error

    def load_checkpoint(
        self, path: str | Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint, with its tensors on the CPU, whatever device they were saved from."""
        if Path(path).is_dir():
            raise ValueError(
                f"{path} is a folder of shards, which `--trainer.strategy=ModelParallelStrategy` has saved and reads. "
                "To test the policy elsewhere, give its `export` as `model.policy`; to train on, make one file of it: "
                "`python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`."
            )
        host: Any = "cpu"
        return dict(super().load_checkpoint(path, host, weights_only))


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


def read_state(path: str | None, strategy: Strategy, weights_only: bool | None = None) -> dict[str, Any]:
    """What a checkpoint holds, before a model is loaded: of one file also the weights, which are mapped, not read.

    It is empty without a checkpoint, and for a plugin of the user's, which reads its own files.
    """
    if path is None or type(strategy.checkpoint_io) not in (TorchCheckpointIO, DurableCheckpointIO):
        return {}
    file = Path(path) / "meta.pt" if Path(path).is_dir() else Path(path)
    must = f"`ckpt_path` must be a checkpoint of a run, such as last.ckpt, but {path}"
    if not file.is_file():
        raise ValueError(f"{must} is a folder without one. A policy in Hugging Face format goes to `model.policy`.")
    try:
        content = _load(file, weights_only)
    except Exception as error:  # A damaged file can raise anything.
        if refused := re.search(r"Unsupported (?:global: GLOBAL|class) [\w.]+", str(error)):
            raise ValueError(
                f"`ckpt_path` must hold nothing but tensors and plain values, but {path} does not ({refused[0]}). If "
                "you trust it, add `--weights_only=false`."
            ) from error
        raise ValueError(
            f"{must} cannot be read ({first_line(error)}). If it is damaged, take another one of its folder."
        ) from error
    if not isinstance(content, dict) or "global_step" not in content:
        raise ValueError(f"{must} holds other things. Weights in Hugging Face format go to `model.policy`.")
    return content


def _load(file: Path, weights_only: bool | None) -> Any:
    """The content of a file, whose tensors are mapped into memory if the file system supports that."""
    with contextlib.suppress(OSError, RuntimeError):
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(file))
    return torch.load(file, map_location="cpu", weights_only=weights_only)


def remove_parts(folder: Path) -> None:
    """Remove the incomplete checkpoints in a folder that were left by killed runs."""
    for part in [*folder.glob(f"*.ckpt{_PART}"), *folder.glob(f".*.ckpt.*{UNFINISHED}")]:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Checks of a checkpoint that a run is to load, made before its model is loaded."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grail_lightning.distributed.checkpoint_io import DurableCheckpointIO, check_whole, damaged

_SHARDS = (".metadata", "meta.pt")  # The files of a folder of shards that are not shards themselves.
_REFUSED = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")


def check_checkpoint(
    path: str | None, strategy: Strategy, weights_only: bool | None = None
) -> Mapping[str, Any] | None:
    """Check that a checkpoint is one of a run, and that torch will read it, without reading its tensors.

    Args:
        path: A file, or a folder of shards; None if a run begins anew.
        strategy: The strategy that will load it. A checkpoint plugin of the user's reads its own files, unchecked.
        weights_only: As `torch.load` will get it.

    Returns:
        What it holds beside shards: `global_step`, and of one file the weights (`state_dict`). None if it is not known.

    Raises:
        ValueError: If it is not.
    """
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        return _check_folder(file, weights_only, sharded=isinstance(strategy, ModelParallelStrategy))
    if type(strategy.checkpoint_io) not in (TorchCheckpointIO, DurableCheckpointIO):
        return None
    check_whole(path)
    return _state(file, _content(file, weights_only))


def _content(file: Path, weights_only: bool | None) -> object:
    """What a file holds. Its tensors are mapped into memory, so that none is read before it is used."""
    try:
        return _read(file, weights_only, mapped=zipfile.is_zipfile(file))
    except Exception:  # Some file systems cannot map files, and a damaged pickle can raise anything.
        try:
            return _read(file, weights_only, mapped=False)
        except Exception as error:
            raise _refusal(file, error) from error


def _read(file: Path, weights_only: bool | None, *, mapped: bool) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About pickles of other protocols.
        return torch.load(file, mmap=mapped, map_location="cpu", weights_only=weights_only)


def _refusal(file: Path, error: Exception) -> ValueError:
    """The error about a file that torch does not load."""
    if not _is_torchs(file):
        return ValueError(
            f"`ckpt_path` must be a checkpoint of a run, such as last.ckpt, but {file} is no file of torch. "
            f"{_instead(file)}"
        )
    if refused := _REFUSED.search(str(error)):
        return ValueError(
            f"`ckpt_path` must hold nothing but tensors and plain values, but {file} holds {refused[1]}, which could "
            "run code. If you trust the file, add `--weights_only=false`."
        )
    return damaged(file)


def _is_torchs(file: Path) -> bool:
    """Whether `torch.save` has written a file in its present format, whole or not."""
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _state(file: Path, content: object) -> dict[str, Any]:
    """The content of a file, which must be the state of a run."""
    keys = ("state_dict", "global_step", "pytorch-lightning_version")
    if not isinstance(content, dict) or not all(key in content for key in keys):
        got = f"{', '.join(map(str, list(content)[:3]))} …" if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"`ckpt_path` must be a checkpoint of a run, but {file} holds other things ({got}). {_instead(file)} A "
            "folder with weights in Hugging Face format goes to `model.policy`."
        )
    version = str(content["pytorch-lightning_version"])
    if not re.match(r"\d+\.\d", version):
        raise ValueError(
            f"`ckpt_path` must be a checkpoint of a run, but {file} was saved by no version of Lightning (it says "
            f"{version!r}). {_instead(file)}"
        )
    return content


def _check_folder(folder: Path, weights_only: bool | None, *, sharded: bool) -> Mapping[str, Any]:
    files = sorted(str(file) for file in folder.glob("*.ckpt"))
    if not all((folder / name).is_file() for name in _SHARDS):
        if (folder / "config.json").is_file():
            remedy = f"It is a policy in Hugging Face format: set `model.policy` to {folder}."
        else:
            remedy = f"Give one of {', '.join(files)}." if files else "Give last, best, or a file."
        raise ValueError(f"`ckpt_path` must be a checkpoint, but {folder} is a folder without one. {remedy}")
    if not sharded:
        raise ValueError(
            f"`ckpt_path` {folder} must be one file here, but got a folder of shards. Use the strategy that saved "
            f"it, or run `python -m lightning.pytorch.utilities.consolidate_checkpoint {folder}`."
        )
    try:
        FileSystemReader(folder).read_metadata()
    except Exception as error:  # As above.
        raise damaged(folder) from error
    content: Any = _content(folder / _SHARDS[1], weights_only)
    return content if isinstance(content, dict) else {}


def _instead(file: Path) -> str:
    others = sorted(str(other) for other in file.parent.glob("*.ckpt") if other != file)
    return f"Beside it there are {', '.join(others)}." if others else "Give last, best or another file."

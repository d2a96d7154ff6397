"""Whether the disks have room for the checkpoints and the export that a run will write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from grail_lightning.callbacks.checkpoints import LastCheckpoint
from grail_lightning.callbacks.export import ExportPolicy
from grail_lightning.callbacks.hooks import callbacks_of, fast_dev_run, module_of, policy_of
from grail_lightning.runtime.writable import existing, free_bytes, in_units


@dataclass(frozen=True)
class Written:
    """Files of one kind that a run writes.

    Attributes:
        name: What they are called in messages.
        folder: Their folder, which need not exist yet.
        size: The bytes of one of them.
        missing: How many of them are not there yet.
        replaced: Whether it is a checkpoint: a newer one is written completely before the older one is removed. An
            export is written once, after the last checkpoint.
    """

    name: str
    folder: Path
    size: int
    missing: int
    replaced: bool = True


def check_disk_space(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Compare what a run will still write with the free space of each disk. A broadcast: every rank must call it.

    Sizes are those of the tensors, so the optimiser must have taken a step. Sharded tensors count with their global
    size. Of ``save_top_k: -1``, which keeps every checkpoint, one is counted, and nothing of a second model that has
    not been used yet.

    Returns:
        A warning if the checkpoints fit one by one, but not all that the run keeps; None if everything fits.

    Raises:
        ValueError: If there is no room for a single checkpoint.
    """
    refused, warning = None, None
    if trainer.is_global_zero and not fast_dev_run(trainer):
        for files in _by_disk(_files(trainer, pl_module)):
            refused, warning = refused or _refusal(files), warning or _warning(files)
    refused, warning = trainer.strategy.broadcast((refused, warning))
    if refused is not None:
        raise ValueError(refused)
    return warning


def _refusal(files: list[Written]) -> str | None:
    saved = [file for file in files if file.replaced]
    largest = max(saved, key=lambda file: file.size, default=None)
    if largest is None or (free := free_bytes(largest.folder)) >= largest.size:
        return None
    return (
        f"A checkpoint of this run takes {in_units(largest.size)}, but {largest.folder} has {in_units(free)} free. "
        "Free some space, or choose a folder on another disk: that of the run (`trainer.logger`), or those of "
        "`checkpoint.dirpath` and `last_checkpoint.folder`."
    )


def _warning(files: list[Written]) -> str | None:
    saved = [file for file in files if file.replaced]
    twice = max((file.size for file in saved), default=0)
    after = sum(file.size * file.missing for file in files if not file.replaced)
    needed = sum(file.size * file.missing for file in saved) + max(twice, after)
    if (free := free_bytes(files[0].folder)) >= needed:
        return None
    parts = [f"{file.name} {file.missing} x {in_units(file.size)}" for file in saved if file.missing]
    last = "the export" if after > twice else "a checkpoint beside the one that it replaces"
    less = (
        "keep less: `checkpoint.save_top_k: 0` keeps no best checkpoint, and `checkpoint.save_weights_only: true` "
        "keeps its weights alone"
    )
    return (
        f"The files of this run will need up to {in_units(needed)} more in {files[0].folder}, but {in_units(free)} are "
        f"free there ({', '.join((*parts, f'{in_units(max(twice, after))} for {last}'))}). Free some space, or "
        f"{less if saved else 'set `export.folder` to a folder on another disk'}."
    )


def _files(trainer: Trainer, pl_module: LightningModule) -> Iterator[Written]:
    whole, weights, exported = _sizes(trainer, pl_module)
    for callback in callbacks_of(trainer):
        if isinstance(callback, LastCheckpoint):
            yield Written("last", callback.file.parent, whole, missing=int(not callback.file.exists()))
        elif isinstance(callback, ModelCheckpoint) and _saves(callback, trainer):
            size = weights if callback.save_weights_only else whole
            kept = abs(callback.save_top_k) + bool(callback.save_last)
            there = max(len(callback.best_k_models), bool(callback.best_model_path)) + bool(callback.last_model_path)
            missing = max(0, kept - there)
            name, folder = "best" if callback.monitor else "checkpoint", Path(callback.dirpath or "")
            yield Written(name, folder, size, missing=missing)
        elif isinstance(callback, ExportPolicy):
            missing = int(not (callback.path / "config.json").exists())
            yield Written("export", callback.path, exported, missing=missing, replaced=False)


def _saves(callback: ModelCheckpoint, trainer: Trainer) -> bool:
    """Whether it will write something, and on this machine. What it monitors must be measured."""
    if "://" in str(callback.dirpath):
        return False
    measured = not (callback.monitor or "").startswith("val/") or trainer.enable_validation
    return bool((callback.save_top_k and measured) or callback.save_last)


def _sizes(trainer: Trainer, pl_module: LightningModule) -> tuple[int, int, int]:
    """Bytes of a checkpoint, of one with weights alone, and of the export, all of them without their small parts."""
    module = module_of(pl_module)
    policy = list(policy_of(module).parameters())
    masters = module.gradients is not None and module.gradients.masters is not None
    weights = sum(p.numel() * (4 if masters and p.requires_grad else p.element_size()) for p in policy)
    second = [] if module.second is None else module.second.tensors()
    whole = weights + _bytes(state for optimizer in trainer.optimizers for state in _state(optimizer)) + _bytes(second)
    merged = module.loading.lora is not None  # The export has no adapters of their own.
    return whole, weights + _bytes(second), _bytes(p for p in policy if not (merged and p.requires_grad))


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    return (value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return round(sum(tensor.numel() * _element_bytes(tensor) for tensor in tensors))


def _element_bytes(tensor: Tensor) -> float:
    """Bytes for each element. Quantised tensors (torchao) consist of others, but report the dtype that they replace."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__") or not local.numel():
        return local.element_size()
    inner: list[Tensor] = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
    return sum(part.numel() * _element_bytes(part) for part in inner) / local.numel()


def _by_disk(files: Iterable[Written]) -> list[list[Written]]:
    """The files of each file system."""
    disks: dict[int, list[Written]] = {}
    for file in files:
        disks.setdefault(existing(file.folder).stat().st_dev, []).append(file)
    return list(disks.values())

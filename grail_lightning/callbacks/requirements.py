"""Checks of the Trainer's settings before the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, Trainer

from grail_lightning.callbacks.choices import UNUSABLE_CALLBACKS
from grail_lightning.callbacks.hooks import fast_dev_run
from grail_lightning.data.modules import PromptData
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.runtime.writable import check_writable


def check_run(trainer: Trainer) -> None:
    """Raise now for settings with which a fit would fail later.

    Raises:
        ValueError: If a callback does not work with this module, validation would never be due, or the folder of the
            run cannot be written.
    """
    _check_callbacks(getattr(trainer, "callbacks", []))  # Lightning does not declare the attribute.
    _check_validation(trainer)
    folder = RunFolder(trainer).path  # A broadcast: every rank must take part.
    if trainer.is_global_zero and not fast_dev_run(trainer):
        check_writable(folder, "trainer.logger.save_dir" if trainer.loggers else "trainer.default_root_dir")
        for callback in trainer.checkpoint_callbacks:
            for option, name in (("checkpoint.dirpath", "dirpath"), ("last_checkpoint.folder", "folder")):
                if own := getattr(callback, name, None):
                    check_writable(Path(own), option)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that every callback works with this module.

    Raises:
        ValueError: If one does not.
    """
    for callback in callbacks:
        for name in (cls.__name__ for cls in type(callback).__mro__):
            if name in UNUSABLE_CALLBACKS:
                raise ValueError(f"`trainer.callbacks` must leave out {name}: {UNUSABLE_CALLBACKS[name]}")


def _check_validation(trainer: Trainer) -> None:
    """Check that validation will be due.

    Raises:
        ValueError: If its interval is not positive, or is counted within an epoch and longer than it.
    """
    interval, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    data = getattr(trainer, "datamodule", None)
    never = "For no validation set `trainer.limit_val_batches: 0`."
    if interval <= 0:
        raise ValueError(f"`trainer.val_check_interval` must be positive, but got {interval}. {never}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"`trainer.check_val_every_n_epoch` must be at least 1 or null, but got {epochs}. {never}")
    if epochs is None or not isinstance(interval, int) or not isinstance(data, PromptData):
        return
    batches, limit = len(data.train_dataloader()), trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if interval > batches:
        raise ValueError(
            f"`trainer.val_check_interval` must be at most the {batches} batches of an epoch, but got {interval}. "
            "Lower it, or count over epochs with `trainer.check_val_every_n_epoch: null`."
        )

"""The progress bar of a training run, which counts batches of rollouts."""

from __future__ import annotations

import math

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import convert_inf

from grail_lightning.callbacks.hooks import module_of


class BatchProgressBar(TQDMProgressBar):
    """Lightning's bar by tqdm, whose total is right where a batch of rollouts takes several optimiser steps."""

    @property
    def total_train_batches(self) -> int | float:
        """The batches of an epoch, or those that are left until `max_steps`."""
        trainer = self.trainer
        if trainer.max_steps < 0:
            return trainer.num_training_batches
        steps = module_of(trainer.lightning_module).execution.steps_per_batch
        left = math.ceil((trainer.max_steps - trainer.global_step) / steps)
        return min(trainer.num_training_batches, left)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the bar and set its total: Lightning calls no `on_train_epoch_start` in the epoch of a resume."""
        super().on_train_start(trainer, pl_module)
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self.train_progress_bar.total = convert_inf(min(trainer.num_training_batches, done + self.total_train_batches))
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

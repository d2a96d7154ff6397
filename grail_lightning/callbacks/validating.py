"""Validation outside of Lightning's schedule: before the first training step and after the last one."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng


def is_over(trainer: Trainer) -> bool:
    """Whether training ends with this epoch."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    last_step = 0 <= steps <= trainer.global_step
    last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    return last_step or last_epoch or trainer.should_stop


def validate(trainer: Trainer) -> None:
    """Run Lightning's validation loop outside of its schedule, with all its hooks."""
    if not trainer.enable_validation:
        return
    with isolate_rng():
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
        finally:
            trainer.training = True

"""The progress bar."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with reward, accuracy and tokens per second, without the logger's version number.

    Args:
        refresh_rate: Batches between two updates; 0 switches it off.
        leave: Whether the bars of past epochs stay.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        """What the bar shows."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

    @property
    def total_train_batches(self) -> int | float:
        """Batches until `max_steps`, which counts optimiser steps, several a batch; else Lightning's own."""
        total: int | float = super().total_train_batches
        objective = getattr(self.trainer.lightning_module, "objective", None)
        if objective is None or self.trainer.max_steps < 0:
            return total
        needed: int = math.ceil(self.trainer.max_steps / objective.steps_per_batch)
        return min(total, needed)

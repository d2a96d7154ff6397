"""The progress bar."""

from __future__ import annotations

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

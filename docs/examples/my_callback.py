"""A callback that logs the accuracy of training for each value of a column, and the weight of wrong answers."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from grail_lightning import StepOutput


class AccuracyBy(Callback):
    """Logs `by_<column>/<value>`, the share of right rollouts, and `credit/wrong_answer_weight`.

    Args:
        column: The column of the dataset, such as the level of a problem.
    """

    def __init__(self, column: str) -> None:
        self.column = column

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures of this rank's rollouts; a logger takes those of the first rank."""
        output: StepOutput = outputs["output"]  # Lightning asks for a mapping.
        rollouts, weights = output.batch, output.weights.values
        right = defaultdict(list)
        for prompt, correct in zip(rollouts.prompts, rollouts.correct.tolist(), strict=True):
            right[prompt.columns[self.column]].append(correct)
        figures = {f"by_{self.column}/{value}": fmean(values) for value, values in right.items()}
        wrong_answers = rollouts.answer.content & ~rollouts.correct[:, None]  # [B, T]
        if wrong_answers.any():
            figures["credit/wrong_answer_weight"] = weights[wrong_answers].mean().item()
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

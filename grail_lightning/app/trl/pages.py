"""Callbacks of TRL's trainer: pages of completions with token weights, and a method's state in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grail_lightning.app.callbacks.predictions import prediction_rows
from grail_lightning.app.views.page import write_page
from grail_lightning.core.credit.base import TokenCredit
from grail_lightning.core.records.columns import OPTIONAL, PREDICTION, write_parquet
from grail_lightning.core.step.figures import StepOutput

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

STATE_FILE = "credit_state.pt"  # In a checkpoint of TRL's: the state of a method that has one.


class CreditPages(TrainerCallback):  # type: ignore[misc]  # Transformers has no types.
    """Writes the completions of a generation with their token weights as HTML and Parquet, every some steps.

    The files are ``step_00000050.html``, as `predict` writes it, and ``.parquet`` beside it, with the columns of
    the page "Files and columns". They hold the completions of the first process.

    Args:
        every: The number of optimiser steps between two pages; the first generation has one.
        folder: Where they are written; default ``credit`` in `output_dir`.
        max_rollouts: The largest number of completions in a page; the Parquet file has all.
    """

    def __init__(self, every: int = 50, folder: str | None = None, max_rollouts: int = 200) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1 optimiser step, but got {every}.")
        self.every, self.folder, self.max_rollouts = every, folder, max_rollouts
        self._next = 0

    def on_credit(
        self, args: TrainingArguments, state: TrainerState, output: StepOutput, tokenizer: Any, method: str
    ) -> None:
        """Write the page if it is due; the trainer calls it after each generation."""
        step = state.global_step
        if step < self._next or not state.is_world_process_zero:
            return
        self._next = step - step % self.every + self.every
        folder = Path(self.folder or Path(args.output_dir) / "credit")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"step_{step:08d}.parquet"
        none: dict[str, list[Any]] = {name: [None] * len(output.batch) for name in OPTIONAL}
        rows = none | prediction_rows(output, tokenizer, method, {})
        there = [name for name in PREDICTION if name not in OPTIONAL or any(v is not None for v in rows[name])]
        write_parquet(file, rows, there)
        write_page(file, file.with_suffix(".html"), self.max_rollouts, title=f"{method}, step {step}")


class KeepCreditState(TrainerCallback):  # type: ignore[misc]
    """Puts the state of a credit method that has one into TRL's checkpoints."""

    def __init__(self, credit: TokenCredit) -> None:
        self._credit = credit

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the file beside those of the checkpoint; the state is the same on all ranks."""
        if state.is_world_process_zero and (kept := self._credit.state_dict()):
            torch.save(kept, Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / STATE_FILE)

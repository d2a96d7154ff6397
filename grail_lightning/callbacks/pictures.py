"""The callback that draws the credit of tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.answers import align
from grail_lightning.answers.spans import Decoder
from grail_lightning.callbacks.hooks import is_shown, module_of, output_of, rollouts_of
from grail_lightning.callbacks.rollouts import prompt_text, rollout_facts, sampled_values
from grail_lightning.credit import TokenWeights
from grail_lightning.grading import align_rows, labelled_steps
from grail_lightning.runtime.checks import check_options
from grail_lightning.step.advantages import effective_weights
from grail_lightning.step.outputs import StepOutput
from grail_lightning.views.pictures import ShownRollout, heatmap, weight_curves


class CreditPictures(Callback):
    """Draws where the credit goes, for TensorBoard, Weights & Biases, and loggers with their interface.

    - ``credit/rollouts``: a right and a wrong rollout of one group, with the weight of each token as its background,
      labelled steps underlined and the answer framed;
    - ``credit/weight_by_position``: the mean weight and its 10 % and 90 % quantiles against the relative position in
      the response, for right and for wrong rollouts;
    - ``credit/weights``: TensorBoard's histogram of the weights.

    A weight is the token's advantage over that of its rollout: the method's weight, with an additive stage counted into
    it. The rollouts are those of the first rank; curves and histogram show the ones that have an advantage. The first
    rank draws between two batches, since a thread would wait for the same interpreter. It leaves pictures out as long
    as they would take more than their share of the time of the fit. Training does not depend on the pictures. If one
    cannot be drawn, a warning says so once.

    Args:
        every_n_batches: The number of batches between two pictures; 0 draws none. The first batch is always drawn.
        num_groups: The number of groups in a picture, which are drawn at random from those with right and wrong
            rollouts.
        max_lines: The number of lines above which the middle of a response is left out.
        max_time_share: The largest share of the time since the first step that pictures may take; 1 is no limit.
    """

    def __init__(
        self, every_n_batches: int = 10, num_groups: int = 1, max_lines: int = 12, max_time_share: float = 0.01
    ) -> None:
        self.every_n_batches, self.num_groups, self.max_lines = every_n_batches, num_groups, max_lines
        self.max_time_share = max_time_share
        check_options(self, every_n_batches="[0, inf)", num_groups="[1, inf)", max_lines="[2, inf)")
        check_options(self, max_time_share="(0, 1]")
        self._began = self._seconds = self._last = 0.0
        self._failed = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._began, self._seconds, self._last, self._failed = time.perf_counter(), 0.0, 0.0, False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Draw the batch, if it is due and there is time for it."""
        if self._failed or not is_shown(trainer, self.every_n_batches):
            return
        loggers = [logger for logger in trainer.loggers if _takes_pictures(logger)]
        output, start = output_of(outputs), time.perf_counter()
        late = self._seconds + self._last > self.max_time_share * (start - self._began)
        if not loggers or output.weights is None or (late and self.max_time_share < 1):
            return
        try:
            self._draw(output, output.weights, loggers, module_of(pl_module).tokenizer, trainer.global_step)
        except Exception as error:
            self._failed = True
            rank_zero_warn(f"No more pictures of the credit, because one could not be drawn: {error!r:.300}")
        self._last = time.perf_counter() - start
        self._seconds += self._last

    def _draw(
        self, output: StepOutput, weights: TokenWeights, loggers: list[Any], tokenizer: Decoder, step: int
    ) -> None:
        batch = rollouts_of(output)
        weights_shown = effective_weights(batch, weights).detach().float().cpu()
        pairs = _mixed_pairs(batch.correct.tolist(), batch.group.tolist())
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(step)).tolist()
        groups = [
            (prompt_text(batch.prompts[pair[0]]), [_shown(output, row, weights_shown[row], tokenizer) for row in pair])
            for pair in (pairs[place] for place in order[: self.num_groups])
        ]
        pictures = {"credit/rollouts": heatmap(groups, self.max_lines)}
        live = (batch.wrong | (batch.advantages != 0)).cpu()
        values, mask = weights_shown[live].numpy(), batch.response_mask.cpu()[live].numpy()
        finite = values[mask & np.isfinite(values)]
        if len(finite):
            pictures["credit/weight_by_position"] = weight_curves(values, mask, batch.correct.cpu()[live].numpy())
        for logger in loggers:
            if not isinstance(logger, TensorBoardLogger):
                for tag, picture in pictures.items():
                    logger.log_image(tag, [picture], step=step)
                continue
            for tag, picture in pictures.items():
                logger.experiment.add_image(tag, picture, step, dataformats="HWC")
            if len(finite):  # TensorBoard's own bins would take a hundred times as long.
                logger.experiment.add_histogram("credit/weights", finite.astype(np.float64), step, bins=40)


def _takes_pictures(logger: object) -> bool:
    """Whether it is TensorBoard's, or has Lightning's interface for pictures, as `WandbLogger` has."""
    return isinstance(logger, TensorBoardLogger) or callable(getattr(logger, "log_image", None))


def _mixed_pairs(correct: list[bool], group: list[int]) -> list[tuple[int, int]]:
    """The first right and the first wrong row of each group that has both; or the two ends of each group."""
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        groups.setdefault(number, []).append(row)
    firsts = [{correct[row]: row for row in reversed(rows)} for rows in groups.values()]
    mixed = [(first[True], first[False]) for first in firsts if len(first) == 2]
    return mixed or [(rows[0], rows[-1]) for rows in groups.values()]


def _shown(output: StepOutput, row: int, weights: Tensor, tokenizer: Decoder) -> ShownRollout:
    batch, prompt = output.batch, output.batch.prompts[row]
    facts, aligned = rollout_facts(output, row), align_rows(batch, tokenizer, [row])[0]
    answers, valid = prompt.task.answer_spans(aligned.text), batch.valid_mask[row].cpu()
    steps, whole, at = labelled_steps(aligned.text, prompt) or [], aligned, 0
    if batch.turn is not None:  # Answer and steps stand in the last turn, `at` which characters of the whole?
        whole = align(batch.response_ids[row].cpu()[valid].tolist(), tokenizer)
        at = next(
            (k for k, start, stop in zip(whole.starts, aligned.starts, aligned.stops, strict=True) if start < stop), 0
        )
        steps = [replace(step, start=at + step.start, stop=at + step.stop) for step in steps]
    return ShownRollout(
        title=f"{facts['verdict']}, {facts['length']}\n{facts.get('advantage', facts['reward'])}",
        text=whole.text,
        tokens=list(zip(whole.starts, whole.stops, strict=True)),
        weights=sampled_values(weights[valid], batch.response_mask[row].cpu()[valid]),
        steps=steps,
        answer=(at + answers[-1].start, at + answers[-1].stop) if answers else None,
    )

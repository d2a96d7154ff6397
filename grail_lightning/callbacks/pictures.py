"""The callback that draws the credit of tokens."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from grail_lightning.answers import align
from grail_lightning.answers.spans import Decoder
from grail_lightning.callbacks.hooks import fast_dev_run, module_of, output_of, rollouts_of
from grail_lightning.callbacks.rollouts import prompt_text, rollout_facts
from grail_lightning.credit import TokenWeights
from grail_lightning.grading import labelled_steps
from grail_lightning.step.advantages import effective_weights
from grail_lightning.step.outputs import StepOutput
from grail_lightning.views.pictures import ShownGroup, ShownRollout, heatmap, weight_curves

_BINS = 40


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

    Raises:
        ValueError: If a number is too small, or the share not in (0, 1].
    """

    def __init__(
        self, every_n_batches: int = 10, num_groups: int = 1, max_lines: int = 12, max_time_share: float = 0.01
    ) -> None:
        for name, value, least in (
            ("every_n_batches", every_n_batches, 0),
            ("num_groups", num_groups, 1),
            ("max_lines", max_lines, 2),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        if not 0 < max_time_share <= 1:
            raise ValueError(
                f"`max_time_share` must lie in (0, 1], but got {max_time_share}. For no pictures set "
                "`every_n_batches: 0`."
            )
        self.every_n_batches, self.num_groups, self.max_lines = every_n_batches, num_groups, max_lines
        self.max_time_share = max_time_share
        self.seconds = 0.0
        """The time that pictures have taken since training began."""
        self._start()

    def _start(self) -> None:
        self.seconds, self._last, self._failed = 0.0, 0.0, False
        self._began = time.perf_counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Draw the batch, if it is due and there is time for it."""
        if not self.every_n_batches or not trainer.is_global_zero or self._failed or fast_dev_run(trainer):
            return
        loggers = [logger for logger in trainer.loggers if _takes_pictures(logger)]
        output, start = output_of(outputs), time.perf_counter()
        if trainer.fit_loop.total_batch_idx % self.every_n_batches or not loggers or output.weights is None:
            return
        if self.max_time_share < 1 and self.seconds + self._last > self.max_time_share * (start - self._began):
            return
        try:
            self._draw(output, output.weights, loggers, module_of(pl_module).tokenizer, trainer.global_step)
        except Exception as error:
            self._failed = True
            rank_zero_warn(f"No more pictures of the credit, because one could not be drawn: {error!r:.300}")
        self._last = time.perf_counter() - start
        self.seconds += self._last

    def _draw(
        self, output: StepOutput, weights: TokenWeights, loggers: list[Any], tokenizer: Decoder, step: int
    ) -> None:
        batch = rollouts_of(output)
        shares = effective_weights(batch.advantages, weights)
        pictures = {"credit/rollouts": heatmap(self._groups(output, shares, tokenizer, step), self.max_lines)}
        live = (batch.advantages != 0).nonzero().flatten()
        found, mask = _numpy(shares[live]), batch.response_mask[live].cpu().numpy()
        values = found[mask & np.isfinite(found)]
        if len(values):
            pictures["credit/weight_by_position"] = weight_curves(found, mask, batch.correct[live].cpu().numpy())
        for logger in loggers:
            board = logger.experiment if isinstance(logger, TensorBoardLogger) else None
            for tag, picture in pictures.items():
                if board is not None:
                    board.add_image(tag, picture, step, dataformats="HWC")
                else:
                    logger.log_image(tag, [picture], step=step)
            if board is not None and len(values):
                # TensorBoard's own bins would take a hundred times as long.
                board.add_histogram("credit/weights", values.astype(np.float64), step, bins=_BINS)

    def _groups(self, output: StepOutput, shares: Tensor, tokenizer: Decoder, step: int) -> list[ShownGroup]:
        """Groups with a right and a wrong rollout; groups without a difference if there are no others."""
        batch = output.batch
        pairs = mixed_pairs(batch.correct.tolist(), batch.group.tolist())
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(step)).tolist()
        return [
            ShownGroup(
                prompt=prompt_text(batch.prompts[pairs[place][0]]),
                rollouts=[_shown(output, row, shares[row], tokenizer) for row in pairs[place]],
            )
            for place in order[: self.num_groups]
        ]


def _takes_pictures(logger: object) -> bool:
    """Whether it is TensorBoard's, or has Lightning's interface for pictures, as `WandbLogger` has."""
    return isinstance(logger, TensorBoardLogger) or callable(getattr(logger, "log_image", None))


def mixed_pairs(correct: list[bool], group: list[int]) -> list[tuple[int, int]]:
    """The first right and the first wrong row of each group that has both; or the first two rows of each group."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        rows.setdefault(number, []).append(row)
    both = [
        (next(r for r in members if correct[r]), next(r for r in members if not correct[r]))
        for members in rows.values()
        if len({correct[r] for r in members}) == 2
    ]
    return both or [(members[0], members[-1]) for members in rows.values()]


def _shown(output: StepOutput, row: int, shares: Tensor, tokenizer: Decoder) -> ShownRollout:
    batch, prompt = output.batch, output.batch.prompts[row]
    facts = rollout_facts(output, row).split(", ")
    length = int(batch.response_lengths[row])
    aligned = align(batch.response_ids[row, :length].tolist(), tokenizer)
    answers = prompt.task.answer_spans(aligned.text)
    return ShownRollout(
        title=f"{facts[0]}, {facts[-1]}\n{facts[-2]}",  # The verdict, the length and the advantage.
        text=aligned.text,
        tokens=list(zip(aligned.starts, aligned.stops, strict=True)),
        weights=_numpy(shares[:length]).tolist(),
        steps=labelled_steps(aligned.text, prompt) or [],
        answer=(answers[-1].start, answers[-1].stop) if answers else None,
    )


def _numpy(values: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return found

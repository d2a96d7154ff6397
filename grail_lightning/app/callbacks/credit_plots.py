"""The callback that shows rollouts of training: as a picture with the credit of their tokens, and as text."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.answers.spans import Decoder, align
from grail_lightning.app.callbacks.hooks import fast_dev_run, module_of, output_of, rollouts_of
from grail_lightning.app.callbacks.rollouts import answer_place, sampled_values
from grail_lightning.app.views.heatmap import ShownRollout, heatmap
from grail_lightning.core.records.columns import encodable
from grail_lightning.core.rollout.grading import align_rows, labelled_steps
from grail_lightning.core.rollout.rows import prompt_text, response_text
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.step.figures import StepOutput, effective_weights


class CreditPictures(Callback):
    """Shows a right and a wrong rollout of one group in TensorBoard, or in a logger with Lightning's `log_image`.

    - ``credit/rollouts``: a picture in which the background of each token is its weight, labelled steps are underlined
      and the answer is framed;
    - ``train/rollouts``: the whole text, with reference, verdict, reward and advantage, for TensorBoard alone.

    A weight is the token's advantage over that of its rollout: the method's weight, with an additive stage counted into
    it. The group is drawn at random from those of the first rank that have right and wrong rollouts. Training does not
    depend on the pictures. If one cannot be drawn, a warning says so once.

    Args:
        every_n_batches: The number of batches between two pictures; 0 draws none. The first batch is always drawn.
    """

    def __init__(self, every_n_batches: int = 25) -> None:
        self.every_n_batches = every_n_batches
        check_options(self, every_n_batches="[0, inf)")
        self._failed = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Show two rollouts of the batch, if it is due."""
        if not self.every_n_batches or self._failed or not trainer.is_global_zero or fast_dev_run(trainer):
            return
        if trainer.fit_loop.total_batch_idx % self.every_n_batches == 0:
            try:
                self._show(output_of(outputs), trainer, module_of(pl_module).tokenizer)
            except Exception as error:
                self._failed = True
                rank_zero_warn(f"No more pictures of the credit, because one could not be drawn: {error!r:.300}")

    def _show(self, output: StepOutput, trainer: Trainer, tokenizer: Decoder) -> None:
        batch, step = output.batch, trainer.global_step
        loggers: list[Any] = trainer.loggers
        boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        others = [logger for logger in loggers if logger not in boards and callable(getattr(logger, "log_image", None))]
        if not boards and not others:
            return
        rows = (batch.scored if batch.scored.any() else ~batch.scored).nonzero().flatten()
        places = _mixed_pairs(batch.correct[rows].tolist(), batch.group[rows].tolist())
        pairs = [(int(rows[first]), int(rows[second])) for first, second in places]
        pair = pairs[int(torch.randint(len(pairs), (1,), generator=torch.Generator().manual_seed(step)))]
        for board in boards:
            board.experiment.add_text("train/rollouts", "\n\n".join(_text(output, row) for row in pair), step)
        if output.weights is None:
            return
        weights = effective_weights(rollouts_of(output), output.weights).detach().float().cpu()
        responses = [_shown(output, row, weights[row], tokenizer) for row in pair]
        picture = heatmap(prompt_text(batch.prompts[pair[0]]), responses)
        for board in boards:
            board.experiment.add_image("credit/rollouts", picture, step, dataformats="HWC")
        for logger in others:
            logger.log_image("credit/rollouts", [picture], step=step)


def _mixed_pairs(correct: list[bool], group: list[int]) -> list[tuple[int, int]]:
    """The first right and the first wrong row of each group that has both; or the two ends of each group."""
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        groups.setdefault(number, []).append(row)
    firsts = [{correct[row]: row for row in reversed(rows)} for rows in groups.values()]
    mixed = [(first[True], first[False]) for first in firsts if len(first) == 2]
    return mixed or [(rows[0], rows[-1]) for rows in groups.values()]


def _facts(output: StepOutput, row: int) -> dict[str, str]:
    """A rollout's verdict, reward, advantage (if it has one), length, and turns in an environment, for people."""
    batch = output.batch
    reward = f"reward {batch.rewards[row]:.3g}" if batch.scored[row] else "no reward"
    facts = {"verdict": re.sub(r"\W", " ", batch.verdicts[row].status), "reward": reward}
    if output.advantages is not None:
        facts["advantage"] = f"advantage {output.advantages[row]:+.3g}"
    facts["length"] = f"{int(batch.response_lengths[row])} tokens"
    if batch.episodes is not None and batch.in_environment[row]:
        episode = batch.episodes[row]
        facts["turns"] = f"{len(episode.turns)} turns, {len(episode.calls)} calls, end: {episode.end}"
    return facts


def _text(output: StepOutput, row: int) -> str:
    """A rollout as Markdown: its facts, prompt, response (in an environment all turns) and reference."""
    batch, prompt = output.batch, output.batch.prompts[row]
    texts = {"prompt": prompt_text(prompt), "response": response_text(batch, row), "reference": prompt.reference}
    blocks = [f"{name}\n\n{code_block(encodable(text))}" for name, text in texts.items()]
    return "\n\n".join([f"### {', '.join(_facts(output, row).values())}", *blocks])


def code_block(text: str) -> str:
    """Any text as an indented Markdown code block that shows it unchanged.

    Every line is indented by four spaces, so no line can end the block, whereas a text could close a fence.
    Control characters, which TensorBoard's Markdown renderer uses as internal marks, are replaced by U+FFFD.
    """
    lines = [
        "".join(c if c == "\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in line)
        for line in text.splitlines()
    ]
    return "\n".join(f"    {line}" for line in lines) if "".join(lines).strip() else "    (empty)"


def _shown(output: StepOutput, row: int, weights: Tensor, tokenizer: Decoder) -> ShownRollout:
    batch, prompt = output.batch, output.batch.prompts[row]
    facts, aligned = _facts(output, row), align_rows(batch, tokenizer, [row])[0]
    (answer, _), valid = answer_place(output, row, aligned), batch.valid_mask[row].cpu()
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
        answer=answer and (at + answer[0], at + answer[1]),
    )

"""Masks of the sampled tokens that hold the answers and labelled steps of a batch of rollouts.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from grail_lightning.answers import Alignment, AnswerSpan, align
from grail_lightning.answers.spans import special_ids
from grail_lightning.batch import AnswerMasks, SampledBatch
from grail_lightning.tasks.base import Prompt, Step, StepKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WhichBox = Literal["last", "first"]


def align_rows(
    batch: SampledBatch, tokenizer: PreTrainedTokenizerBase, rows: list[int] | None = None
) -> list[Alignment]:
    """The alignment of the sampled tokens of each row, or of some rows, with the characters of its response."""
    some = slice(None) if rows is None else torch.tensor(rows, device=batch.response_ids.device)
    ids, lengths = batch.response_ids[some].tolist(), batch.response_lengths[some].tolist()
    special = special_ids(tokenizer)
    return [align(row[:n], tokenizer, special) for row, n in zip(ids, lengths, strict=True)]


def answer_masks(batch: SampledBatch, alignments: list[Alignment], which: WhichBox = "last") -> AnswerMasks:
    r"""The masks of the tokens of each row's answer, in its task's form; a row without an answer has empty masks.

    For a box, the marker is ``\boxed{`` and the closing brace. White space between a marker and the answer's content
    belongs to neither, so that a token such as `` 7`` behind ``####`` is content.

    Args:
        batch: The batch of ``B`` rows.
        alignments: One alignment for each row, from `align_rows`.
        which: The answer: "last" is the one that is graded, "first" the one that the published GRAIL code uses.

    Returns:
        Four bool masks ``[B, T]``.

    Raises:
        ValueError: If a task does not return ranges within the text.
    """
    shape, device = batch.response_mask.shape, batch.response_mask.device
    whole, content, marker, after = (torch.zeros(shape, dtype=torch.bool) for _ in range(4))
    for row, aligned in enumerate(alignments):
        text = aligned.text
        answers = _answers(text, batch.prompts[row])
        if not answers:
            continue
        found = answers[-1 if which == "last" else 0]
        tokens = aligned.overlapping(found.start, found.stop)
        if not tokens:
            continue
        whole[row, tokens] = True
        content[row, aligned.overlapping(found.content_start, found.content_stop, tokens)] = True
        opening = text[found.start : found.content_start].rstrip()
        marker[row, aligned.overlapping(found.start, found.start + len(opening), tokens)] = True
        marker[row, aligned.overlapping(found.content_stop, found.stop, tokens)] = True
        after[row, tokens[-1] + 1 :] = True
    masks = (mask.to(device) for mask in (whole, content, marker, after))
    whole, content, marker, after = masks
    return AnswerMasks(whole=whole, content=content, marker=marker, after=after & batch.response_mask)


class LocatedStep(NamedTuple):
    """A labelled step of a response.

    Attributes:
        kind: The kind of the step.
        tokens: The indices of its response tokens; for a step with a `result`, those of the result alone, because an
            error is visible there.
    """

    kind: StepKind
    tokens: list[int]


def located_steps(
    batch: SampledBatch, tokenizer: PreTrainedTokenizerBase, rows: Tensor | None = None
) -> list[list[LocatedStep] | None]:
    """The labelled steps of each row; None for a row whose task cannot label it.

    Args:
        batch: The batch of ``B`` rows.
        tokenizer: The tokenizer that the responses were sampled with.
        rows: ``[B]`` bool, the rows to label; the others have no steps. None labels all.

    Raises:
        ValueError: If a task does not return steps within the text.
    """
    asked = [True] * len(batch) if rows is None else rows.tolist()
    texts = zip(asked, batch.texts, batch.prompts, strict=True)
    steps = [labelled_steps(text, prompt) if wanted else None for wanted, text, prompt in texts]
    labelled = [row for row, found in enumerate(steps) if found is not None]
    located: list[list[LocatedStep] | None] = [None] * len(steps)
    if not labelled:
        return located
    for row, aligned in zip(labelled, align_rows(batch, tokenizer, labelled), strict=True):
        if aligned.text != batch.texts[row]:  # The engine decodes in another way.
            steps[row] = labelled_steps(aligned.text, batch.prompts[row])
        located[row] = [
            LocatedStep(step.kind, aligned.overlapping(*(step.result or (step.start, step.stop))))
            for step in steps[row] or []
        ]
    return located


def step_masks(
    batch: SampledBatch, tokenizer: PreTrainedTokenizerBase, rows: Tensor | None = None
) -> dict[StepKind, Tensor] | None:
    """The masks of the tokens of each kind of step, ``[B, T]`` bool; None if no task can label steps.

    For a step with a `result` only the tokens of the result are marked, because an error is visible there.

    Args:
        batch: The batch of ``B`` rows.
        tokenizer: The tokenizer that the responses were sampled with.
        rows: ``[B]`` bool, the rows to label; the masks of the others are empty. None labels all.

    Raises:
        ValueError: If a task does not return steps within the text.
    """
    steps = located_steps(batch, tokenizer, rows)
    if all(row is None for row in steps):
        return None
    kinds: tuple[StepKind, ...] = get_args(StepKind)
    places: dict[StepKind, list[int]] = {kind: [] for kind in kinds}
    width = batch.response_mask.shape[1]
    for row, found in enumerate(steps):
        for step in found or []:
            places[step.kind] += [row * width + token for token in step.tokens]
    masks = {kind: torch.zeros(batch.response_mask.shape, dtype=torch.bool) for kind in kinds}
    for kind, marked in places.items():
        masks[kind].view(-1)[marked] = True
    return {kind: mask.to(batch.response_mask.device) for kind, mask in masks.items()}


def _answers(text: str, prompt: Prompt) -> list[AnswerSpan]:
    """The answers that a task finds in a response. They are checked, because the task may be the user's own class."""
    answers: object = prompt.task.answer_spans(text)
    must = f"`{type(prompt.task).__name__}.answer_spans` must return"
    if not isinstance(answers, list) or not all(isinstance(found, AnswerSpan) for found in answers):
        raise ValueError(f"{must} a list of `AnswerSpan`, which may be empty, but got {str(answers)[:120]}.")
    for found in answers:
        if not 0 <= found.start <= found.content_start <= found.content_stop <= found.stop <= len(text):
            raise ValueError(
                f"{must} ranges within the text, 0 ≤ start ≤ content_start ≤ content_stop ≤ stop ≤ {len(text)}, but "
                f"got {found}. Ranges are of characters, as in text[start:stop]."
            )
    return answers


def labelled_steps(text: str, prompt: Prompt) -> list[Step] | None:
    """The steps that a task labels in a response. They are checked, because the task may be the user's own class.

    Raises:
        ValueError: If a task raises, or does not return steps within the text that do not overlap.
    """
    task = f"`{type(prompt.task).__name__}.label_steps`"
    question = prompt.messages if isinstance(prompt.messages, str) else prompt.messages[-1]["content"]
    where = f"for the prompt {question[:60]!r}. See docs/your_task.md."
    try:
        steps: object = prompt.task.label_steps(text, prompt)
    except Exception as error:
        raise ValueError(
            f"{task} raised {type(error).__name__}: {error} {where} A step is `Step(start=0, stop=5, kind='sound')`."
        ) from error
    if steps is None:
        return None
    if not isinstance(steps, list) or not all(isinstance(step, Step) for step in steps):
        raise ValueError(
            f"{task} must return a list of `Step`, or None where the task cannot label, but got {repr(steps)[:120]} "
            f"{where} `Step` is in grail_lightning.tasks.base."
        )
    for step in steps:
        if step.kind not in get_args(StepKind):
            kinds = ", ".join(get_args(StepKind))
            raise ValueError(f"{task} must return steps whose `kind` is one of {kinds}, but got {step} {where}")
        if not all(_is_range(span, len(text)) for span in ((step.start, step.stop), step.result or (0, 0))):
            raise ValueError(
                f"{task} must return steps within the text, 0 ≤ start ≤ stop ≤ {len(text)}, but got {step} {where} "
                "Ranges are of characters, as in text[start:stop]."
            )
    for one, two in pairwise(sorted(steps, key=lambda step: (step.start, step.stop))):
        if two.start < one.stop:
            raise ValueError(f"{task} must return steps that do not overlap, but got {one} and {two} {where}")
    return steps


def _is_range(span: object, length: int) -> bool:
    """Whether a value is a range of the characters of a text."""
    if not isinstance(span, Sequence) or len(span) != 2 or not all(isinstance(place, int) for place in span):
        return False
    return bool(0 <= span[0] <= span[1] <= length)

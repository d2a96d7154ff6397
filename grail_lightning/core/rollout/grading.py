"""Grading of responses: verdicts, rewards, and masks of the sampled tokens that hold answers and labelled steps.

The response of a rollout of several turns is its last turn. A last turn that calls a tool has no answer.

The task extracts the answer, the verifier compares it, and the task computes the reward. What a task returns is
checked, because it may be the user's own class. Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from grail_lightning.answers.records import UNSCORED, AnswerSpan, AnswerVerifier, Verdict
from grail_lightning.answers.spans import Alignment, align, special_ids, unknown_ids
from grail_lightning.core.records.picture import as_text
from grail_lightning.core.records.task import LARGEST_REWARD, Comparison, Prompt, Step, StepKind, Task
from grail_lightning.core.rollout.batch import AnswerMasks, GradedBatch, SampledBatch
from grail_lightning.core.runtime.pages import page

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WhichBox = Literal["last", "first"]


class TaskVerifiers:
    """The verifiers of a run: a task makes its own when it is first graded; tasks that make theirs alike share one.

    Whoever starts a run closes them at its end, and with them their worker processes.
    """

    def __init__(self) -> None:
        self._made: dict[Callable[[], AnswerVerifier], AnswerVerifier] = {}

    def of(self, task: Task) -> AnswerVerifier:
        """The verifier of a task."""
        make = type(task).make_verifier  # The function is the key, since data loader workers send copies of a task.
        if make not in self._made:
            self._made[make] = make()
        return self._made[make]

    def close(self) -> None:
        """Close them all."""
        for verifier in self._made.values():
            verifier.close()


def grade_and_locate(
    batch: SampledBatch, verifier: AnswerVerifier | TaskVerifiers, tokenizer: PreTrainedTokenizerBase
) -> GradedBatch:
    """The batch with its rewards and verdicts, and with the masks of each answer's tokens.

    A thread locates the answers while the verifier's processes compare them. A rollout in which the policy sampled
    tokens that its tokenizer does not know is not right, whatever its text says, and its reward is at most 0.
    """
    # Grading runs on this thread, so that an interrupt reaches it and ends its workers.
    with ThreadPoolExecutor(1, "answer-masks") as thread:
        unknown = thread.submit(_with_unknown_tokens, batch, tokenizer)
        masks = thread.submit(lambda: answer_masks(batch, align_rows(batch, tokenizer)))
        verdicts = grade_answers(_without_calls(batch), batch.prompts, verifier)
        for row, verdict in enumerate(verdicts):
            if verdict.status == UNSCORED and _hangs(batch, row):  # It hung the tool that would have judged it.
                verdicts[row] = replace(verdict, status="wrong")
        for row in (rows := unknown.result()):
            verdicts[row] = replace(verdicts[row], correct=False, status="unknown_tokens", layer="none")
        rewards, parts = _rewards(batch, verdicts)
        rewards[rows] = rewards[rows].clamp(max=0)
        for name, values in parts["values"].items():  # What a part adds to the reward is at most 0, too.
            adds = parts["weights"][name][rows] > 0
            values[rows] = torch.where(adds, values[rows].clamp(max=0), values[rows].clamp(min=0))
        answer = masks.result()
    device = batch.input_ids.device
    correct = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
    return GradedBatch(
        **batch.fields(),
        answer=answer,
        rewards=rewards.to(device),
        correct=correct.to(device),
        verdicts=verdicts,
        reward_values={name: part.to(device) for name, part in parts["values"].items()},
        reward_weights={name: part.to(device) for name, part in parts["weights"].items()},
        reward_shares={name: part.to(device) for name, part in parts["shares"].items()},
    )


def _with_unknown_tokens(batch: SampledBatch, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The rows in which an id was sampled that the tokenizer does not know, and which decodes to nothing."""
    sampled = torch.unique(batch.response_ids[batch.response_mask])
    unknown = unknown_ids(tokenizer, sampled.tolist())
    if not unknown:
        return []
    held = torch.isin(batch.response_ids, sampled.new_tensor(sorted(unknown))) & batch.response_mask
    return held.any(1).nonzero().flatten().tolist()


def _without_calls(batch: SampledBatch) -> list[str]:
    """The responses in which answers are looked for: those of rollouts that ended with a call are empty."""
    if batch.episodes is None:
        return batch.texts
    calling = [bool(episode.turns and episode.turns[-1].calls) for episode in batch.episodes]
    return ["" if calls else text for text, calls in zip(batch.texts, calling, strict=True)]


def grade_answers(texts: list[str], prompts: list[Prompt], verifier: AnswerVerifier | TaskVerifiers) -> list[Verdict]:
    """One verdict for each response: the task's own, or that of its answer's comparison with the reference."""
    verdicts: dict[int, Verdict] = {}
    for rows in _rows_of_tasks(prompts):
        task = prompts[rows[0]].task
        task_verdicts = task.verdicts([texts[row] for row in rows], [prompts[row] for row in rows])
        verdicts |= {row: verdict for row, verdict in zip(rows, task_verdicts, strict=True) if verdict is not None}
        if open_rows := [row for row in rows if row not in verdicts]:
            kind = task.compare, task.evaluated
            answers = [GivenAnswer(prompts[row].reference, task.answer(texts[row]), *kind) for row in open_rows]
            its = verifier.of(task) if isinstance(verifier, TaskVerifiers) else verifier
            verdicts |= zip(open_rows, compare_answers(answers, its), strict=True)
    return [verdicts[row] for row in range(len(texts))]


def _rows_of_tasks(prompts: Sequence[Prompt]) -> list[list[int]]:
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[id(prompt.task)].append(row)
    return list(rows_of.values())


class GivenAnswer(NamedTuple):
    """A reference, an answer (None if there is none), how they are compared, and whether it must be worked out."""

    reference: str
    answer: str | None
    compare: Comparison
    evaluated: bool = False


def compare_answers(rows: Sequence[GivenAnswer], verifier: AnswerVerifier) -> list[Verdict]:
    """One verdict for each row."""
    formulas = [(reference, answer) for reference, answer, how, _ in rows if answer is not None and how == "math"]
    verdicts = iter(verifier.grade(formulas))
    return [
        Verdict.missing(reference)
        if answer is None
        else _worked_out(next(verdicts), evaluated=evaluated)
        if how == "math"
        else Verdict.of_text(reference, answer, ignore_case=how != "exact", relaxed=how == "relaxed")
        for reference, answer, how, evaluated in rows
    ]


def _worked_out(verdict: Verdict, *, evaluated: bool) -> Verdict:
    """The verdict, or that a right answer could still be carried out where it has to be `evaluated`."""
    if not (evaluated and verdict.correct):
        return verdict
    from grail_lightning.answers.evaluated import unevaluated

    if not unevaluated(verdict.gold, verdict.prediction):
        return verdict
    return replace(verdict, correct=False, status="unevaluated")


def _rewards(batch: SampledBatch, verdicts: list[Verdict]) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """The rewards, and by name values and weights of their parts and what else is logged of them (`shares`).

    ``[B]`` float64 on the CPU each; NaN for none.
    """
    # The dtypes are explicit: a large offset (`1e8 + correct`) has no differences left in float32.
    rewards = torch.zeros(len(batch), dtype=torch.float64)
    values, weights, shares = (
        defaultdict[str, Tensor](lambda: torch.full((len(batch),), torch.nan, dtype=torch.float64)) for _ in range(3)
    )
    lengths = batch.response_lengths.tolist()
    for rows in _rows_of_tasks(batch.prompts):
        texts, prompts = [batch.texts[r] for r in rows], [batch.prompts[r] for r in rows]
        task = prompts[0].task
        ids = {"ids": _token_ids(batch, rows)} if task.reads_token_ids else {}
        earned = task.earn(texts, prompts, [verdicts[r] for r in rows], [lengths[r] for r in rows], **ids)
        wanted = f"`{type(task).__name__}.earn` must return {len(rows)} finite numbers or None, one a response,"
        total = [None if value is None else float(value) for value in earned.total]
        numbers = [value for value in total if value is not None]
        if len(total) != len(rows) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{wanted} but got {str(earned.total)[:200]}. None is no opinion about a response.")
        if abs(largest := max(numbers, key=abs, default=0.0)) > LARGEST_REWARD:
            raise ValueError(
                f"{wanted} between ±{LARGEST_REWARD:g}, since advantages are float32, but got {largest:g}. Lower the "
                "`weight` of its rewards, or divide its own `reward` by a constant."
            )
        rewards[rows] = _or_nan(total)
        for name, part in earned.values.items():
            if len(part) != len(rows):
                raise ValueError(f"{wanted} but its part `{name}` has {len(part)}.")
            values[name][rows] = _or_nan(part)
            weights[name][rows] = earned.weights.get(name, 1.0)
        for name, share in earned.shares.items():
            shares[name][rows] = torch.tensor(share, dtype=torch.float64)
    parts = {"values": dict(values), "weights": dict(weights), "shares": dict(shares)}
    return _capped_if_hanging(batch, rewards), parts


def _capped_if_hanging(batch: SampledBatch, rewards: Tensor) -> Tensor:
    """The rewards ``[B]``, of which that of a rollout in which a tool hangs is at most the least of its group.

    Its environment could not be asked: without a reward it would never pay, and 0 is the best of a group of penalties.
    """
    hanging = torch.tensor([_hangs(batch, row) for row in range(len(batch))], dtype=torch.bool)
    group, has_reward, paid = batch.group.cpu(), ~rewards.isnan() & ~hanging, rewards.clone()
    for row in hanging.nonzero().flatten().tolist():
        others = rewards[has_reward & (group == group[row])].tolist()
        paid[row] = min([rewards[row].nan_to_num(0.0).item(), *others])
    return paid


def _hangs(batch: SampledBatch, row: int) -> bool:
    """Whether a tool of a rollout hangs, so that its environment could not be asked."""
    turns = batch.episodes[row].turns[-1:] if batch.episodes else ()
    return any(call.status == "timeout" for turn in turns for call in turn.calls)


def _or_nan(values: Sequence[float | None]) -> Tensor:
    """``[B]`` float64: the values, NaN in place of None."""
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def _token_ids(batch: SampledBatch, rows: list[int]) -> list[list[int]]:
    """The token ids after the prompt of some rows, without padding."""
    lengths = batch.valid_lengths.tolist()
    return [batch.response_ids[row, : lengths[row]].tolist() for row in rows]


def align_rows(
    batch: SampledBatch, tokenizer: PreTrainedTokenizerBase, rows: list[int] | None = None
) -> list[Alignment]:
    """The alignment of the tokens after the prompt of each row, or of some rows, with the characters of its response.

    The response is the last turn. Tokens before it have no character, so that no answer is found in a tool's result.
    """
    some = slice(None) if rows is None else torch.tensor(rows, dtype=torch.long, device=batch.response_ids.device)
    ids, lengths = batch.response_ids[some].tolist(), batch.valid_lengths[some].tolist()
    special = special_ids(tokenizer)
    if batch.turn is None:
        return [align(row[:n], tokenizer, special) for row, n in zip(ids, lengths, strict=True)]
    last = _last_turns(batch)[some]
    starts, sizes = last.long().argmax(1).tolist(), last.sum(1).tolist()
    return [
        _within(align(row[start : start + size], tokenizer, special), start, n)
        for row, start, size, n in zip(ids, starts, sizes, lengths, strict=True)
    ]


def _last_turns(batch: SampledBatch) -> Tensor:
    """``[B, T]`` bool: the tokens that the policy sampled in the last turn of each row, which are neighbours."""
    if batch.turn is None:
        return batch.response_mask
    turn = batch.turn.masked_fill(~batch.response_mask, -1)
    return batch.response_mask & (turn == turn.amax(1, keepdim=True))


def _within(aligned: Alignment, start: int, length: int) -> Alignment:
    """The alignment of tokens from `start` on as that of a row of `length` tokens, whose other ones have no text."""
    before, behind = (0,) * start, (len(aligned.text),) * (length - start - len(aligned.starts))
    return replace(aligned, starts=before + aligned.starts + behind, stops=before + aligned.stops + behind)


def answer_masks(batch: SampledBatch, alignments: list[Alignment], which: WhichBox = "last") -> AnswerMasks:
    r"""The masks of the tokens of each row's answer, in its task's form; a row without an answer has empty masks.

    For a box, the marker is ``\boxed{`` and the closing brace. White space between a marker and the answer's content
    belongs to neither, so that a token such as `` 7`` behind ``####`` is content. The last answer is the one that is
    graded, the first one that which the published GRAIL code uses.
    """
    device = batch.response_mask.device
    whole, content, marker, after = (torch.zeros(batch.response_mask.shape, dtype=torch.bool) for _ in range(4))
    texts = _without_calls(batch)
    for row, aligned in enumerate(alignments):
        text = aligned.text
        if not texts[row] or not (answers := _answers(text, batch.prompts[row])):
            continue
        span = answers[-1 if which == "last" else 0]
        if not (tokens := aligned.overlapping(span.start, span.stop)):
            continue
        whole[row, tokens] = True
        content[row, aligned.overlapping(span.content_start, span.content_stop, tokens)] = True
        opening = text[span.start : span.content_start].rstrip()
        marker[row, aligned.overlapping(span.start, span.start + len(opening), tokens)] = True
        marker[row, aligned.overlapping(span.content_stop, span.stop, tokens)] = True
        after[row, tokens[-1] + 1 :] = True
    whole, content, marker, after = (mask.to(device) for mask in (whole, content, marker, after))
    return AnswerMasks(whole=whole, content=content, marker=marker, after=after & batch.response_mask)


def _answers(text: str, prompt: Prompt) -> list[AnswerSpan]:
    answers: object = prompt.task.answer_spans(text)
    if not isinstance(answers, list) or not all(_is_answer(answer, len(text)) for answer in answers):
        raise ValueError(
            f"`{type(prompt.task).__name__}.answer_spans` must return a list of `AnswerSpan`, which may be empty, with "
            f"ranges within the text, 0 ≤ start ≤ content_start ≤ content_stop ≤ stop ≤ {len(text)}, but got "
            f"{str(answers)[:200]}. Ranges are of characters, as in text[start:stop]."
        )
    return answers


def _is_answer(answer: object, length: int) -> bool:
    return isinstance(answer, AnswerSpan) and (
        0 <= answer.start <= answer.content_start <= answer.content_stop <= answer.stop <= length
    )


class LocatedStep(NamedTuple):
    """A labelled step of a response."""

    kind: StepKind
    tokens: list[int]  # Its response tokens; of a step with a `result` those of the result, where an error is visible.


def located_steps(
    batch: SampledBatch, tokenizer: PreTrainedTokenizerBase, rows: Tensor | None = None
) -> list[list[LocatedStep] | None]:
    """The labelled steps of each row, or of some rows ``[B]`` bool; None for a row whose task cannot label it."""
    selection = [True] * len(batch) if rows is None else rows.tolist()
    texts = zip(selection, batch.texts, batch.prompts, strict=True)
    steps = [labelled_steps(text, prompt) if wanted else None for wanted, text, prompt in texts]
    labelled = [row for row, of_row in enumerate(steps) if of_row is not None]
    located: list[list[LocatedStep] | None] = [None] * len(steps)
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
    """The masks of the tokens of each kind of step, ``[B, T]`` bool; None if no task can label steps."""
    steps = located_steps(batch, tokenizer, rows)
    if all(row is None for row in steps):
        return None
    masks: dict[StepKind, Tensor] = {
        kind: torch.zeros(batch.response_mask.shape, dtype=torch.bool) for kind in get_args(StepKind)
    }
    for row, of_row in enumerate(steps):
        for step in of_row or []:
            masks[step.kind][row, step.tokens] = True
    return {kind: mask.to(batch.response_mask.device) for kind, mask in masks.items()}


def labelled_steps(text: str, prompt: Prompt) -> list[Step] | None:
    """The steps that a task labels in a response; a ValueError if one is no range within the text, or two overlap."""
    steps: object = prompt.task.label_steps(text, prompt)
    if steps is None:
        return None
    wrong: Sequence[object] = [steps]
    if isinstance(steps, list):
        wrong = [step for step in steps if not _is_step(step, len(text))]
        if not wrong:
            ordered = sorted(steps, key=lambda step: (step.start, step.stop))
            wrong = next(([first, second] for first, second in pairwise(ordered) if second.start < first.stop), [])
    if wrong:
        question = prompt.messages if isinstance(prompt.messages, str) else as_text(prompt.messages[-1]["content"])
        raise ValueError(
            f"`{type(prompt.task).__name__}.label_steps` must return a list of `Step` of grail_lightning, "
            f"or None where the task cannot label: ranges of characters, 0 ≤ start ≤ stop ≤ {len(text)}, that do not "
            f"overlap, each with a `kind` of {', '.join(get_args(StepKind))}; but got "
            f"{', '.join(repr(step)[:120] for step in wrong[:2])} for the prompt {question[:60]!r}. See "
            f"{page('reference/your_task.md')}."
        )
    return steps  # type: ignore[return-value]


def _is_step(step: object, length: int) -> bool:
    if not isinstance(step, Step) or step.kind not in get_args(StepKind):
        return False
    ranges: list[Any] = [(step.start, step.stop), *([] if step.result is None else [step.result])]
    return all(
        isinstance(span, Sequence)
        and len(span) == 2
        and all(isinstance(place, int) for place in span)
        and 0 <= span[0] <= span[1] <= length
        for span in ranges
    )

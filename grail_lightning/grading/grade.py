"""Grading of responses: the task extracts the answer, the verifier compares it, and the task computes the reward.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from grail_lightning.answers import Verdict, Verifier
from grail_lightning.batch import GradedBatch, SampledBatch
from grail_lightning.grading.locate import align_rows, answer_masks
from grail_lightning.tasks.base import Earned, Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def grade_answers(texts: list[str], prompts: list[Prompt], verifier: Verifier) -> list[Verdict]:
    """One verdict for each response. The verifier compares the answers of tasks whose `compare` is `math`.

    Raises:
        ValueError: If a task returns an answer that is no string.
    """
    answers = [_answer(prompt.task, text) for text, prompt in zip(texts, prompts, strict=True)]
    pairs = [
        (prompt.reference, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer is not None and prompt.task.compare == "math"
    ]
    graded = iter(verifier.grade(pairs))
    return [
        Verdict.missing(prompt.reference)
        if answer is None
        else next(graded)
        if prompt.task.compare == "math"
        else Verdict.of_text(prompt.reference, answer, ignore_case=prompt.task.compare == "text")
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def grade_and_locate(batch: SampledBatch, verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> GradedBatch:
    """The batch with its rewards and verdicts, and with the masks of each answer's tokens.

    A thread locates the answers while the verifier's processes compare them.

    Raises:
        ValueError: If a task's answer is no string, or its reward raises or is not one finite number for each
            response.
    """
    # Grading runs on this thread, so that an interrupt reaches it and ends its workers.
    with ThreadPoolExecutor(1, "answer-masks") as thread:
        masks = thread.submit(lambda: answer_masks(batch, align_rows(batch, tokenizer)))
        verdicts = grade_answers(batch.texts, batch.prompts, verifier)
        rewards, values = _rewards(batch, verdicts)
        answer = masks.result()
    device = batch.input_ids.device
    correct = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
    return GradedBatch(
        **batch.fields(),
        answer=answer,
        rewards=rewards.to(device),
        correct=correct.to(device),
        verdicts=verdicts,
        reward_values={name: part.to(device) for name, part in values.items()},
    )


def _rewards(batch: SampledBatch, verdicts: list[Verdict]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The rewards and their parts by name, ``[B]`` float32 on the CPU."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(batch.prompts):
        rows_of[id(prompt.task)].append(row)
    # The dtypes are explicit, since `precision: bf16-true` changes the default.
    rewards = torch.zeros(len(batch), dtype=torch.float32)
    values: dict[str, torch.Tensor] = defaultdict(lambda: torch.full((len(batch),), torch.nan, dtype=torch.float32))
    lengths = batch.response_lengths.tolist()
    for rows in rows_of.values():
        earned = _earned(
            batch.prompts[rows[0]].task,
            [batch.texts[r] for r in rows],
            [batch.prompts[r] for r in rows],
            [verdicts[r] for r in rows],
            [lengths[r] for r in rows],
        )
        rewards[rows] = torch.tensor(earned.total, dtype=torch.float32)
        for name, part in earned.values.items():
            known = [torch.nan if value is None else value for value in part]
            values[name][rows] = torch.tensor(known, dtype=torch.float32)
    return rewards, dict(values)


def _earned(task: Task, texts: list[str], prompts: list[Prompt], verdicts: list[Verdict], lengths: list[int]) -> Earned:
    """The rewards of a task. They are checked, because the task may be the user's own class."""
    name = f"`{type(task).__name__}.earn`"
    wanted = f"must return {len(texts)} finite numbers, one a response,"
    try:
        earned = task.earn(texts, prompts, verdicts, lengths)
        total = [float(value) for value in earned.total]
    except ValueError as error:  # The task raises with its own message.
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{name} {wanted} but it raised {type(error).__name__}: {error}. Call it by hand to debug it "
            "(docs/your_reward.md)."
        ) from error
    if len(total) != len(texts) or not all(map(math.isfinite, total)):
        raise ValueError(f"{name} {wanted} but got {str(earned.total)[:200]}.")
    for part, values in earned.values.items():
        if len(values) != len(texts):
            raise ValueError(
                f"{name} must return {len(texts)} values of its part `{part}`, one a response, but got {len(values)}."
            )
    return Earned(total=total, values=earned.values)


def _answer(task: Task, text: str) -> str | None:
    """The answer that a task extracts. It is checked, because the task may be the user's own class."""
    answer: object = task.answer(text)
    if answer is None or isinstance(answer, str):
        return answer
    raise ValueError(
        f"`{type(task).__name__}.answer` must return a string, or None for a response without an answer, but got "
        f"{type(answer).__name__} ({str(answer)[:80]}). Return the answer as text: `str(answer)`."
    )

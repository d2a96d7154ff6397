"""From responses to rewards: the task reads the answer, the verifier judges it, the task rewards it.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grail_lightning.answers.verifier import Verdict, Verifier
from grail_lightning.locate import align_rows, answer_masks
from grail_lightning.rollout import Earned, Prompt, RolloutBatch, Task


def judge(texts: list[str], prompts: list[Prompt], verifier: Verifier) -> list[Verdict]:
    """One verdict a response; a response without an answer is `missing` and costs the verifier nothing.

    Raises:
        ValueError: If what a task takes for the answer is no string.
    """
    answers = [_answer(prompt.task, text) for text, prompt in zip(texts, prompts, strict=True)]
    pairs = [(p.reference, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
    graded = iter(verifier.grade(pairs))
    return [
        Verdict.missing(prompt.reference) if answer is None else next(graded)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def grade(batch: RolloutBatch, verifier: Verifier) -> tuple[RolloutBatch, list[Verdict]]:
    """The batch with `rewards`, their parts and `correct`, and the verdicts behind them.

    Raises:
        ValueError: If a task's answer is no string, or its reward raises or is not one finite number a response.
    """
    verdicts = judge(batch.texts, batch.prompts, verifier)
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(batch.prompts):
        rows_of[id(prompt.task)].append(row)
    # Dtypes are named, since `precision: bf16-true` changes the default.
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
    device = batch.input_ids.device
    correct = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
    moved = {name: part.to(device) for name, part in values.items()}
    return batch.replace(rewards=rewards.to(device), correct=correct.to(device), reward_values=moved), verdicts


def grade_and_locate(batch: RolloutBatch, verifier: Verifier, tokenizer: Any) -> tuple[RolloutBatch, list[Verdict]]:
    """`grade`, and while the verifier's processes are at work the tokens of each answer: its masks ``[B, T]``.

    Raises:
        ValueError: As `grade` does.
    """
    # Grading stays on this thread, where an interrupt reaches it and ends its workers.
    with ThreadPoolExecutor(1, "answer-masks") as thread:
        masks = thread.submit(lambda: answer_masks(batch, align_rows(batch, tokenizer)))
        graded, verdicts = grade(batch, verifier)
        return graded.replace(answer=masks.result()), verdicts


def _answer(task: Task, text: str) -> str | None:
    """The answer that the task reads, checked: a task may be anybody's."""
    answer: Any = task.answer(text)
    if answer is None or isinstance(answer, str):
        return answer
    raise ValueError(
        f"`{type(task).__name__}.answer` must return a string, or None for a response without an answer, but got "
        f"{type(answer).__name__} ({str(answer)[:80]}). Return the answer as text: `str(answer)`."
    )


def _earned(task: Task, texts: list[str], prompts: list[Prompt], verdicts: list[Verdict], lengths: list[int]) -> Earned:
    """What the task gives, checked: a task may be anybody's."""
    name = f"`{type(task).__name__}.earn`"
    wanted = f"must return {len(texts)} finite numbers, one a response,"
    try:
        earned = task.earn(texts, prompts, verdicts, lengths)
        total = [float(value) for value in earned.total]
    except ValueError as error:  # the task's own words
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{name} {wanted} but it raised {type(error).__name__}: {error}. Call it by hand to debug it "
            "(docs/grading.md)."
        ) from error
    if len(total) != len(texts) or not all(map(math.isfinite, total)):
        raise ValueError(f"{name} {wanted} but got {str(earned.total)[:200]}.")
    for part, values in earned.values.items():
        if len(values) != len(texts):
            raise ValueError(
                f"{name} must return {len(texts)} values of its part `{part}`, one a response, but got {len(values)}."
            )
    return Earned(total=total, values=earned.values)

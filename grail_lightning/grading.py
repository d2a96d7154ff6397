"""From responses to rewards: the task reads the answer, the verifier judges it, the task rewards it."""

from __future__ import annotations

from collections import defaultdict

import torch

from grail_lightning.answers.verifier import Verdict, Verifier
from grail_lightning.rollout import Prompt, RolloutBatch


def judge(texts: list[str], prompts: list[Prompt], verifier: Verifier) -> list[Verdict]:
    """One verdict a response; a response without an answer is `missing` and costs the verifier nothing."""
    answers = [prompt.task.answer(text) for text, prompt in zip(texts, prompts, strict=True)]
    pairs = [(p.reference, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
    graded = iter(verifier.grade(pairs))
    return [
        Verdict.missing(prompt.reference) if answer is None else next(graded)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def grade(batch: RolloutBatch, verifier: Verifier) -> tuple[RolloutBatch, list[Verdict]]:
    """The batch with `rewards`, their parts and `correct`, and the verdicts behind them.

    Raises:
        ValueError: If a task's reward is not one finite number a response.
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
        task = batch.prompts[rows[0]].task
        earned = task.earn(
            [batch.texts[r] for r in rows],
            [batch.prompts[r] for r in rows],
            [verdicts[r] for r in rows],
            [lengths[r] for r in rows],
        )
        given = torch.as_tensor(earned.total, dtype=torch.float32)
        if given.shape != (len(rows),) or not given.isfinite().all():
            raise ValueError(
                f"`{type(task).__name__}.reward` must return {len(rows)} finite numbers, one a response, "
                f"but got {earned.total!r}."
            )
        rewards[rows] = given
        for name, part in earned.values.items():
            known = [torch.nan if value is None else value for value in part]
            values[name][rows] = torch.tensor(known, dtype=torch.float32)
    device = batch.input_ids.device
    correct = torch.tensor([verdict.correct for verdict in verdicts], dtype=torch.bool)
    moved = {name: part.to(device) for name, part in values.items()}
    return batch.replace(rewards=rewards.to(device), correct=correct.to(device), reward_values=moved), verdicts

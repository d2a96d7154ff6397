"""The rollouts of another trainer, as tensors, and the batch that credit methods take.

Shapes: ``B`` rows (rollouts), ``P`` prompt tokens, ``T`` response tokens. Masks: bool or 0 and 1; True counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grail_lightning.answers.records import Verdict
from grail_lightning.core.engines.base import build_batch
from grail_lightning.core.functional.advantages import EQUAL_REWARDS, group_sums
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.episode import Episode
from grail_lightning.core.records.picture import pictures_in
from grail_lightning.core.records.task import Prompt, TokenText
from grail_lightning.core.rollout.batch import RolloutBatch, SampledBatch
from grail_lightning.core.rollout.grading import align_rows, answer_masks
from grail_lightning.core.tasks.answered import MathTask


@dataclass(frozen=True, kw_only=True)
class GivenRollouts:
    """Rollouts of another trainer as tensors: prompts padded on the left, responses padded on the right.

    Attributes:
        prompt_ids: ``[B, P]`` long.
        prompt_mask: ``[B, P]``, True on the prompt's tokens.
        response_ids: ``[B, T]`` long, as they were sampled.
        response_mask: ``[B, T]``, True on the tokens that the policy sampled, the end token included.
        rewards: ``[B]``; NaN for a rollout that nothing scored, which then has the advantage 0.
        group: ``[B]`` long, equal for the rollouts of one prompt, in any order. All of a group must be on one rank.
        valid_mask: ``[B, T]``, True on all tokens after the prompt, with what an environment put in between turns; None
            if every token was sampled.
        advantages: ``[B]``, of the rollouts; None is the reward less its group's mean.
        correct: ``[B]`` bool, for methods that read which rollouts are right; None is a reward above 0.
        finished: ``[B]`` bool, whether a response ended by itself; None is all.
        prompts: One for each row, for methods that read references, columns or the form of the answer; None has no
            reference, and the answer is in the last box.
        row: ``[B]`` long, a row's number within the step over all ranks, a key of its random numbers; None counts them.
        episodes: One for each row of a batch with several turns: the turns as text.

    Raises:
        ValueError: If a tensor has another shape, or is padded on the other side.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    rewards: Tensor
    group: Tensor
    valid_mask: Tensor | None = None
    advantages: Tensor | None = None
    correct: Tensor | None = None
    finished: Tensor | None = None
    prompts: Sequence[Prompt] | None = None
    row: Tensor | None = None
    episodes: Sequence[Episode] | None = None

    def __post_init__(self) -> None:
        rows = (len(self.response_ids),)
        shapes = dict.fromkeys(("prompt_ids", "prompt_mask"), self.prompt_ids.shape[:2])
        shapes |= dict.fromkeys(("response_ids", "response_mask", "valid_mask"), self.response_ids.shape[:2])
        shapes |= dict.fromkeys(("rewards", "group", "advantages", "correct", "finished", "row"), torch.Size(rows))
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and (tensor.shape != shape or len(tensor) != rows[0]):
                raise ValueError(
                    f"`{name}` must have the shape {[rows[0], *shape[1:]]}, but got {list(tensor.shape)}. Rows are "
                    "rollouts."
                )
        for name in ("prompts", "episodes"):
            if (given := getattr(self, name)) is not None and len(given) != rows[0]:
                raise ValueError(f"`{name}` must have one entry for each of {rows[0]} rows, but got {len(given)}.")
        self._check_padding()

    def _check_padding(self) -> None:
        prompts, valid, sampled = self.prompt_mask.bool(), self._valid(), self.response_mask.bool()
        for name, side, padded_first in (("prompt_mask", "left", prompts), ("valid_mask", "right", ~valid)):
            if (padded_first[:, :-1] & ~padded_first[:, 1:]).any():
                raise ValueError(
                    f"`{name}` must be of rows that are padded on the {side} alone, but got a row with a gap. A mask "
                    "of sampled tokens with gaps is `response_mask`, beside a `valid_mask` without."
                )
        if (sampled & ~valid).any():
            raise ValueError("`response_mask` must lie within `valid_mask`, but got a sampled token outside of it.")

    def _valid(self) -> Tensor:
        return (self.response_mask if self.valid_mask is None else self.valid_mask).bool()

    def batch(self, policy: Policy) -> RolloutBatch:
        """The batch that credit methods take; answers are located in the form of each prompt's task."""
        device = self.response_ids.device
        sampled = self._sampled(policy).to(device)
        rewards, group = self.rewards.to(device).double(), self.group.to(device).long()
        correct = rewards > 0 if self.correct is None else self.correct.to(device).bool()
        correct = correct & ~rewards.isnan()
        verdicts = [
            Verdict(
                correct=right,
                status="right" if right else "wrong",
                layer="none",
                gold=prompt.reference,
                prediction=prompt.task.answer(text) or "",
            )
            for right, prompt, text in zip(correct.tolist(), sampled.prompts, sampled.texts, strict=True)
        ]
        advantages = _less_the_mean(rewards, group) if self.advantages is None else self.advantages.to(device)
        return RolloutBatch(
            **sampled.fields(),
            answer=answer_masks(sampled, align_rows(sampled, policy.tokenizer)),
            rewards=rewards,
            correct=correct,
            verdicts=verdicts,
            advantages=advantages.float().masked_fill(rewards.isnan(), 0),
        )

    def _sampled(self, policy: Policy) -> SampledBatch:
        valid, sampled = self._valid().cpu(), self.response_mask.bool().cpu()
        prompt_rows = zip(self.prompt_ids.cpu(), self.prompt_mask.bool().cpu(), strict=True)
        prompt_ids = [ids[mask].tolist() for ids, mask in prompt_rows]
        ids = [ids[mask].tolist() for ids, mask in zip(self.response_ids.cpu(), valid, strict=True)]
        prompts = self.prompts
        if prompts is None:
            task, decode = MathTask(), policy.tokenizer.decode
            prompts = [Prompt(messages=TokenText(decode(row), row), reference="", task=task) for row in prompt_ids]
        turns: dict[str, Any] = {}
        if bool((valid != sampled).any()) or self.episodes is not None:
            numbers = _turn_numbers(sampled)
            turns = {
                "sampled": [row[mask].tolist() for row, mask in zip(sampled, valid, strict=True)],
                "turn": [row[mask].tolist() for row, mask in zip(numbers, valid, strict=True)],
            }
        finished = [True] * len(ids) if self.finished is None else self.finished.bool().tolist()
        if policy.vision is not None:  # The tokens of a picture have ids of their own.
            name = policy.vision.pictures.name
            prompt_ids = [name(row, pictures_in(p.messages)) for row, p in zip(prompt_ids, prompts, strict=True)]
        encoded = [
            Prompt(messages=TokenText("", row), reference="", task=prompt.task)
            for row, prompt in zip(prompt_ids, prompts, strict=True)
        ]
        batch = build_batch(policy, encoded, 1, ids, finished, **turns)
        row = batch.row if self.row is None else self.row.long().cpu()
        episodes = None if self.episodes is None else list(self.episodes)
        return batch.replace(prompts=list(prompts), group=self.group.long().cpu(), row=row, episodes=episodes)


def _turn_numbers(sampled: Tensor) -> Tensor:
    """``[B, T]`` long: a turn begins where the policy samples after tokens that were put in; these belong to it."""
    before = torch.nn.functional.pad(sampled[:, :-1], (1, 0), value=False)
    return ((sampled & ~before).long().cumsum(1) - 1).clamp(min=0)


def _less_the_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """``[B]`` float64: the reward less its group's mean; exactly 0 in a group of one, and where all are equal."""
    advantages = torch.zeros_like(rewards)
    scored = ~rewards.isnan()
    total, size = group_sums(rewards[scored], group[scored])
    centred = rewards[scored] - total / size
    varying, _ = group_sums((centred.abs() > EQUAL_REWARDS).double(), group[scored])
    advantages[scored] = centred.masked_fill((size < 2) | (varying == 0), 0)
    return advantages

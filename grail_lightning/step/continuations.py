"""Continuations of rollouts, sampled by the engine and graded by the verifier, for credit methods that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from grail_lightning.batch import AnswerMasks, GradedBatch, RolloutBatch, SampledBatch
from grail_lightning.batch.rows import join_groups
from grail_lightning.credit import TokenCredit
from grail_lightning.credit.continuations import Continuations, Continued, Place
from grail_lightning.engines import build_batch
from grail_lightning.engines.checks import sample_rollouts
from grail_lightning.grading import grade_and_locate
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.options import Objective
from grail_lightning.step.sampler import Sampler
from grail_lightning.tasks.base import TokenText


def check_continuations(credit: TokenCredit, objective: Objective) -> None:
    """Check that the update can train on the continuations that a method draws, if it asks for that.

    Raises:
        ValueError: With a teacher, which has prompts for the rollouts alone.
    """
    if credit.trains_continuations and objective.distillation is not None:
        raise ValueError(
            "`train_continuations` must be off with `objective.distillation`, whose teacher sees the prompts of the "
            "rollouts alone. Set one of them to false or null."
        )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of the engine.

    Attributes:
        sampled: The continuations as the engine returned them, ``n`` rows.
        own: The sampled tokens of each, up to the rollout's limit.
        seeds: The seed of each.
        whole: The whole responses, graded.
        number: The continuations of each place.
    """

    sampled: SampledBatch
    own: list[list[int]]
    seeds: list[int]
    whole: GradedBatch
    number: int


class SampledContinuations(Continuations):
    """Continuations that the run's engine samples.

    Args:
        sampler: What samples and grades the rollouts of training.
        step: The number of optimiser steps taken so far, a key of the random numbers.
    """

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step = sampler, step
        self._calls: list[_Call] = []

    @torch.no_grad()
    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[Continued | None], int]:
        """See `Continuations.draw`. Calls of the engine are filled from the earliest place on."""
        found: list[Continued | None] = [None] * len(places)
        keys = batch.row.tolist()
        waiting = sorted(range(len(places)), key=lambda k: (places[k].length, keys[places[k].row]))
        spent = 0
        self.sampler.push()
        while True:
            call = self._fitting(batch, [places[k] for k in waiting], number, budget - spent)
            if not self._any_rank(call > 0):
                return found, spent
            taken, waiting = waiting[:call], waiting[call:]
            made = self._call(batch, [places[k] for k in taken], number)
            spent += int(made.sampled.response_mask.sum())
            rewards, correct = made.whole.rewards.tolist(), made.whole.correct.tolist()
            for start, k in zip(range(0, len(rewards), number), taken, strict=True):
                found[k] = Continued(rewards[start : start + number], correct[start : start + number])
            if taken:
                self._calls.append(made)

    def drawn(self) -> GradedBatch | None:
        """See `Continuations.drawn`. The number of a row (`SampledBatch.row`) is the seed of its continuation."""
        return reduce(join_groups, map(self._rows, self._calls)) if self._calls else None

    def _fitting(self, batch: RolloutBatch, places: list[Place], number: int, budget: int) -> int:
        """How many of the places, whose lengths rise, fit into one call and the budget."""
        if not places:
            return 0
        longest = self._limit(places)
        room = getattr(self.sampler.policy.model.config.get_text_config(), "max_position_embeddings", None)
        prompts = batch.prompt_lengths.tolist()
        affordable = max(0, budget) // (number * longest)
        for k, place in enumerate(places[:affordable]):
            # The first place of a call sets the limit of all; the original limit was possible by itself.
            if k and room is not None and prompts[place.row] + place.length + longest > room:
                return k
        return min(affordable, len(places))

    def _limit(self, places: list[Place]) -> int:
        return self.sampler.sampling.max_response_length - min((place.length for place in places), default=0)

    def _call(self, batch: RolloutBatch, places: list[Place], number: int) -> _Call:
        """Sample and grade. The prompts are token ids, so that nothing is tokenised again."""
        keys = batch.row.tolist()
        prompts, seeds = [], []
        for row, length in places:
            kept = batch.attention_mask[row, : batch.prompt_width].nonzero().flatten()
            ids = [*batch.input_ids[row, kept].tolist(), *batch.response_ids[row, :length].tolist()]
            text = self.sampler.policy.tokenizer.decode(ids)
            prompts.append(replace(batch.prompts[row], messages=TokenText(text, ids)))
            seeds += [derive_seed(run_seed(), "continuation", self.step, keys[row], length, k) for k in range(number)]
        sampling = replace(self.sampler.sampling, max_response_length=self._limit(places))
        sampled = sample_rollouts(self.sampler.engine, self.sampler.policy, prompts, number, sampling, seeds)
        own, responses, finished = [], [], []
        lengths = sampled.response_lengths.tolist()
        for k, (row, length) in enumerate(place for place in places for _ in range(number)):
            room = self.sampler.sampling.max_response_length - length
            own.append(sampled.response_ids[k, : min(lengths[k], room)].tolist())
            responses.append([*batch.response_ids[row, :length].tolist(), *own[k]])
            finished.append(bool(sampled.finished[k]) and lengths[k] <= room)
        asked = [batch.prompts[row] for row, _ in places]
        whole = build_batch(self.sampler.policy, asked, number, responses, finished)
        graded = grade_and_locate(whole, self.sampler.verifier, self.sampler.policy.tokenizer)
        return _Call(sampled=sampled, own=own, seeds=seeds, whole=graded, number=number)

    def _rows(self, call: _Call) -> GradedBatch:
        """The continuations of a call, with the rewards and verdicts of the whole responses."""
        sampler_logprobs, whole = call.sampled.sampling_logprobs, call.whole
        logprobs = None
        if sampler_logprobs is not None:
            logprobs = [row[: len(ids)] for row, ids in zip(sampler_logprobs.tolist(), call.own, strict=True)]
        prompts, finished = call.sampled.prompts[:: call.number], whole.finished.tolist()
        rows = build_batch(self.sampler.policy, prompts, call.number, call.own, finished, logprobs)
        kept = whole.response_lengths - rows.response_lengths
        columns = torch.arange(rows.response_mask.shape[1], device=kept.device) + kept[:, None]
        places = columns.clamp(max=whole.response_mask.shape[1] - 1)

        def own(mask: Tensor) -> Tensor:
            return mask.gather(1, places) & rows.response_mask

        answer = whole.answer
        return GradedBatch(
            **rows.replace(row=torch.tensor(call.seeds, device=rows.row.device)).fields(),
            answer=AnswerMasks(
                whole=own(answer.whole), content=own(answer.content), marker=own(answer.marker), after=own(answer.after)
            ),
            rewards=whole.rewards,
            correct=whole.correct,
            verdicts=whole.verdicts,
            reward_values=whole.reward_values,
        )

    def _any_rank(self, claim: bool) -> bool:
        return bool(all_reduce(torch.tensor(int(claim), device=self.sampler.policy.device), "max"))

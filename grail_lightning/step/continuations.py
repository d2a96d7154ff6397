"""Continuations of rollouts, sampled by the engine and graded by the verifier, for credit methods that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit.continuations import Continuations, Continued, Place
from grail_lightning.engines import build_batch
from grail_lightning.engines.checks import sample_rollouts
from grail_lightning.grading.grade import grade_and_locate
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.sampler import Sampler
from grail_lightning.tasks.base import TokenText


class SampledContinuations(Continuations):
    """Continuations that the run's engine samples.

    Args:
        sampler: What samples and grades the rollouts of training.
        step: The number of optimiser steps taken so far, a key of the random numbers.
    """

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step = sampler, step

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
            graded, tokens = self._call(batch, [places[k] for k in taken], number)
            spent += tokens
            rewards, correct = graded.rewards.tolist(), graded.correct.tolist()
            for start, k in zip(range(0, len(rewards), number), taken, strict=True):
                found[k] = Continued(rewards[start : start + number], correct[start : start + number])

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

    def _call(self, batch: RolloutBatch, places: list[Place], number: int) -> tuple[GradedBatch, int]:
        """The whole responses, graded, and the number of tokens sampled for them.

        The prompts are token ids, so that nothing is tokenised again.
        """
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
        responses, finished = [], []
        lengths = sampled.response_lengths.tolist()
        for k, (row, length) in enumerate(place for place in places for _ in range(number)):
            room = self.sampler.sampling.max_response_length - length
            own = sampled.response_ids[k, : min(lengths[k], room)].tolist()
            responses.append([*batch.response_ids[row, :length].tolist(), *own])
            finished.append(bool(sampled.finished[k]) and lengths[k] <= room)
        asked = [batch.prompts[row] for row, _ in places]
        whole = build_batch(self.sampler.policy, asked, number, responses, finished)
        graded = grade_and_locate(whole, self.sampler.verifier, self.sampler.policy.tokenizer)
        return graded, int(sampled.response_mask.sum())

    def _any_rank(self, claim: bool) -> bool:
        return bool(all_reduce(torch.tensor(int(claim), device=self.sampler.policy.device), "max"))

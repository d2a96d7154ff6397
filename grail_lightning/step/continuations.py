"""Continuations of rollouts, for credit methods that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit.base import Continuations, Place, check_one_turn
from grail_lightning.engines.base import build_batch, longest_row
from grail_lightning.grading import grade_and_locate
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.sampler import Sampler, sample_rollouts
from grail_lightning.tasks.problem import TokenText


class SampledContinuations(Continuations):
    """Continuations that the sampler of training samples; `step`, the optimiser steps so far, is a key of the draws."""

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step = sampler, step

    @torch.no_grad()
    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[list[float] | None], int]:
        """See `Continuations.draw`. Calls of the engine are filled from the earliest place on."""
        check_one_turn(self, batch, "continues rollouts from places within them", "Set another `model.credit`.")
        outcomes: list[list[float] | None] = [None] * len(places)
        keys = batch.row.tolist()
        waiting = sorted(range(len(places)), key=lambda k: (places[k].length, keys[places[k].row]))
        spent = 0
        self.sampler.push()
        while True:
            fitting = self._fitting(batch, [places[k] for k in waiting], number, budget - spent)
            if not all_reduce(torch.tensor(fitting, device=self.sampler.policy.device), "max"):
                return outcomes, spent
            drawn, waiting = waiting[:fitting], waiting[fitting:]
            graded, tokens = self._call(batch, [places[k] for k in drawn], number)
            spent += tokens
            rewards = graded.rewards.tolist()
            for start, k in zip(range(0, len(rewards), number), drawn, strict=True):
                outcomes[k] = rewards[start : start + number]

    def _fitting(self, batch: RolloutBatch, places: list[Place], number: int, budget: int) -> int:
        """How many of the places, whose lengths rise, fit into one call and the budget."""
        if not places:
            return 0
        longest = self._limit(places)
        room = longest_row(self.sampler.engine, self.sampler.policy)
        prompts = batch.prompt_lengths.tolist()
        affordable = places[: max(0, budget) // (number * longest)]
        for k, (row, length) in enumerate(affordable):
            # The first place of a call sets the limit of all; the original limit was possible by itself.
            if k and prompts[row] + length + longest > room:
                return k
        return len(affordable)

    def _limit(self, places: list[Place]) -> int:
        return self.sampler.sampling.max_response_length - min((place.length for place in places), default=0)

    def _call(self, batch: RolloutBatch, places: list[Place], number: int) -> tuple[GradedBatch, int]:
        """The whole responses, graded, and the number of tokens sampled for them.

        The prompts are token ids, so that nothing is tokenised again.
        """
        policy, limit, keys = self.sampler.policy, self.sampler.sampling.max_response_length, batch.row.tolist()
        prompts, seeds = [], []
        for row, length in places:
            prompt = batch.attention_mask[row, : batch.prompt_width].nonzero().flatten()
            ids = [*batch.input_ids[row, prompt].tolist(), *batch.response_ids[row, :length].tolist()]
            prompts.append(replace(batch.prompts[row], messages=TokenText(policy.tokenizer.decode(ids), ids)))
            seeds += [derive_seed(run_seed(), "continuation", self.step, keys[row], length, k) for k in range(number)]
        sampling = replace(self.sampler.sampling, max_response_length=self._limit(places))
        sampled = sample_rollouts(self.sampler.engine, policy, prompts, number, sampling, seeds)
        responses, finished = [], []
        lengths = sampled.response_lengths.tolist()
        for k, (row, length) in enumerate(place for place in places for _ in range(number)):
            own = sampled.response_ids[k, : min(lengths[k], limit - length)].tolist()
            responses.append([*batch.response_ids[row, :length].tolist(), *own])
            finished.append(bool(sampled.finished[k]) and lengths[k] <= limit - length)
        whole = build_batch(policy, [batch.prompts[row] for row, _ in places], number, responses, finished)
        graded = grade_and_locate(whole, self.sampler.verifier, policy.tokenizer)
        return graded, int(sampled.response_mask.sum())

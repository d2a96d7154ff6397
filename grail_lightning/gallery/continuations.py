"""Continuations of rollouts, sampled and graded as training samples and grades: a service of credit methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch

from grail_lightning.core.credit.base import check_one_turn
from grail_lightning.core.credit.service import RolloutSampler, RunParts, Service
from grail_lightning.core.engines.base import build_batch
from grail_lightning.core.records.task import TokenText
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.runtime.seeds import derive_seed, run_seed


class Prefix(NamedTuple):
    """A place within a rollout."""

    row: int  # The rollout's index in the batch.
    length: int  # The number of its response tokens that are kept.


class SampledContinuations(Service):
    """Continuations of rollouts by the policy with its present weights, graded like rollouts.

    `sampler` returns the sampler of training, and `step` the optimiser steps so far, a key of the draws.
    """

    uses_engine = True

    def __init__(self, sampler: Callable[[], RolloutSampler], step: Callable[[], int]) -> None:
        self._sampler, self._step = sampler, step

    @classmethod
    def open(cls, owner: object, run: RunParts) -> Self:
        """Continuations by the sampler of training."""
        return cls(run.sampler, run.step)

    @torch.no_grad()
    def draw(
        self, batch: RolloutBatch, places: Sequence[Prefix], number: int, budget: int
    ) -> tuple[list[list[float] | None], int]:
        """Continue from places in rollouts. A collective: every rank must call it, also without a place.

        A continuation depends on the run's seed, the step, the row's identity (`RolloutBatch.row`), the place and its
        number, not on the other places. It ends where the rollout would have: at the same limit in tokens. Calls of the
        engine are filled from the earliest place on.

        `places` are of this rank's rollouts, each before the rollout's end, `number` the continuations of each, and
        `budget` the most tokens that all of them may have on this rank. Returns the rewards of the whole responses
        from each place that have one, None where the budget did not suffice; and the number of sampled tokens.
        """
        check_one_turn(self, batch, "continues rollouts from places within them", "Set another `model.credit`.")
        outcomes: list[list[float] | None] = [None] * len(places)
        keys = batch.row.tolist()
        waiting = sorted(range(len(places)), key=lambda k: (places[k].length, keys[places[k].row]))
        spent, sampler = 0, self._sampler()
        sampler.update_weights()
        while True:
            fitting = _fitting(sampler, batch, [places[k] for k in waiting], number, budget - spent)
            if not all_reduce(torch.tensor(fitting, device=sampler.policy.device), "max"):
                return outcomes, spent
            drawn, waiting = waiting[:fitting], waiting[fitting:]
            graded, tokens = self._call(sampler, batch, [places[k] for k in drawn], number)
            spent += tokens
            rewards = graded.rewards.tolist()
            for start, k in zip(range(0, len(rewards), number), drawn, strict=True):
                outcomes[k] = [reward for reward in rewards[start : start + number] if not math.isnan(reward)]

    def _call(
        self, sampler: RolloutSampler, batch: RolloutBatch, places: list[Prefix], number: int
    ) -> tuple[GradedBatch, int]:
        """The whole responses, graded, and the number of tokens sampled for them.

        The prompts are token ids, so that nothing is tokenised again.
        """
        policy, limit, keys = sampler.policy, sampler.sampling.max_response_length, batch.row.tolist()
        step, prompts, seeds = self._step(), [], []
        for row, length in places:
            prompt = batch.attention_mask[row, : batch.prompt_width].nonzero().flatten()
            ids = [*batch.input_ids[row, prompt].tolist(), *batch.response_ids[row, :length].tolist()]
            prompts.append(replace(batch.prompts[row], messages=TokenText(policy.tokenizer.decode(ids), ids)))
            seeds += [derive_seed(run_seed(), "continuation", step, keys[row], length, k) for k in range(number)]
        sampling = replace(sampler.sampling, max_response_length=_limit(sampler, places))
        sampled = sampler.responses(prompts, number, sampling, seeds)
        responses, finished = [], []
        lengths = sampled.response_lengths.tolist()
        for k, (row, length) in enumerate(place for place in places for _ in range(number)):
            sampled_ids = sampled.response_ids[k, : min(lengths[k], limit - length)].tolist()
            responses.append([*batch.response_ids[row, :length].tolist(), *sampled_ids])
            finished.append(bool(sampled.finished[k]) and lengths[k] <= limit - length)
        whole = build_batch(policy, [batch.prompts[row] for row, _ in places], number, responses, finished)
        return sampler.grade(whole), int(sampled.response_mask.sum())


def _fitting(sampler: RolloutSampler, batch: RolloutBatch, places: list[Prefix], number: int, budget: int) -> int:
    """How many of the places, whose lengths rise, fit into one call and the budget."""
    if not places:
        return 0
    longest = _limit(sampler, places)
    room = sampler.longest_row
    prompts = batch.prompt_lengths.tolist()
    affordable = places[: max(0, budget) // (number * longest)]
    for k, (row, length) in enumerate(affordable):
        # The first place of a call sets the limit of all; the original limit was possible by itself.
        if k and prompts[row] + length + longest > room:
            return k
    return len(affordable)


def _limit(sampler: RolloutSampler, places: list[Prefix]) -> int:
    """The most tokens of a continuation from any of the places."""
    return sampler.sampling.max_response_length - min((place.length for place in places), default=0)

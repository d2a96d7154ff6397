"""Sampling and grading of responses, and of continuations of rollouts, with the weights of the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grail_lightning.answers.records import AnswerVerifier
from grail_lightning.batch import GradedBatch, RolloutBatch, SampledBatch, Sampling
from grail_lightning.credit.base import Continuations, Outcomes, Place, check_one_turn
from grail_lightning.distributed.sharding import gathered
from grail_lightning.engines.base import RolloutEngine, build_batch
from grail_lightning.engines.checks import check_logprobs, check_rollouts
from grail_lightning.grading import TaskVerifiers, grade_and_locate
from grail_lightning.policy.model import Policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.collectives import all_reduce, world_size
from grail_lightning.runtime.seeds import SeedKey, derive_seed, run_seed
from grail_lightning.step.episodes import has_environments, play
from grail_lightning.tasks.problem import Prompt, TokenText


def training_key(step: int, sampling: int = 0) -> SeedKey:
    """The key of the random numbers of a training batch, sampled ahead or not.

    The policy will have taken `step` optimiser steps when the batch trains. `sampling` is 0, or the number of the
    further sampling that replaces groups that are all right or all wrong.
    """
    return "train", step, sampling


def sample_rollouts(
    engine: RolloutEngine,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int | Sequence[int],
) -> SampledBatch:
    """The rollouts that an engine samples, from one seed or from one for each row, checked by `check_rollouts`."""
    if isinstance(seed, int):
        batch = engine.generate(prompts, group_size, sampling, seed)
    else:
        batch = engine.generate_seeded(prompts, group_size, sampling, seed)
    check_rollouts(engine, batch, policy, prompts, group_size, sampling)
    return batch


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples and grades this rank's rows of a batch."""

    group_size: int  # Responses to each prompt.
    sampling: Sampling
    policy: Policy  # Its weights sample.
    engine: RolloutEngine
    verifier: AnswerVerifier | TaskVerifiers  # It compares answers; the reward is that of the prompt's task.
    clock: PhaseClock  # Of the phases ``sample`` and ``grade``.
    rank: int  # The index of this process among the ranks.
    sampler_cap: float | None = None  # `execution.sampler_cap` in training; the engine then reports log-probabilities.

    def __call__(self, prompts: list[Prompt], key: SeedKey | list[int]) -> GradedBatch:
        """Graded responses to this rank's prompts, from the present weights.

        The key of the random numbers is joined by the run's seed and the rank; or it is a list with the seed of each
        row.
        """
        whole = nullcontext() if self.engine.own_weights else gathered(self.policy)
        with self.clock.phase("sample"), whole:
            self.push()
            sampled = self.draw(prompts, key)
        return self.grade(sampled)

    @torch.no_grad()
    def push(self) -> None:
        """Give the engine the present weights. Every rank must call it."""
        self.engine.update_weights(self.policy)

    @torch.no_grad()
    def draw(self, prompts: list[Prompt], key: SeedKey | list[int]) -> SampledBatch:
        """Responses from the weights that were pushed last; arguments as above."""
        arguments = self.engine, self.policy, prompts, self.group_size, self.sampling
        if has_environments(prompts, self.engine, self.policy.device):
            rows = self.row_numbers(torch.arange(len(prompts) * self.group_size)).tolist()
            batch = play(
                *arguments, [derive_seed(run_seed(), *key, row) for row in rows] if isinstance(key, tuple) else key
            )
            check_rollouts(self.engine, batch, *arguments[1:])
        else:
            seed = derive_seed(run_seed(), *key, self.rank) if isinstance(key, tuple) else key
            batch = sample_rollouts(*arguments, seed)
        # The engine's class should have told before; this is the latest moment at which nothing is lost.
        check_logprobs(self.engine, self.sampler_cap, reports=not len(batch) or batch.sampling_logprobs is not None)
        return self.numbered(batch)

    def numbered(self, batch: SampledBatch) -> SampledBatch:
        """The batch with row numbers of the whole step: a rollout has the same one for any number of ranks."""
        return batch.replace(row=self.row_numbers(batch.row))

    def row_numbers(self, rows: Tensor) -> Tensor:
        """The numbers within the whole step of some rows of this rank."""
        group, place = rows // self.group_size, rows % self.group_size
        return (group * world_size() + self.rank) * self.group_size + place

    @torch.no_grad()
    def grade(self, sampled: SampledBatch) -> GradedBatch:
        """The responses with their rewards and the positions of their answers."""
        with self.clock.phase("grade"):
            return grade_and_locate(sampled, self.verifier, self.policy.tokenizer)


class SampledContinuations(Continuations):
    """Continuations that the sampler of training samples; `step`, the optimiser steps so far, is a key of the draws."""

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step = sampler, step

    @torch.no_grad()
    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[Outcomes | None], int]:
        """See `Continuations.draw`. Calls of the engine are filled from the earliest place on."""
        check_one_turn(self, batch, "continues rollouts from places within them", "Set another `model.credit`.")
        outcomes: list[Outcomes | None] = [None] * len(places)
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
            rewards, correct = graded.rewards.tolist(), graded.correct.tolist()
            for start, k in zip(range(0, len(rewards), number), drawn, strict=True):
                outcomes[k] = Outcomes(rewards[start : start + number], correct[start : start + number])

    def _fitting(self, batch: RolloutBatch, places: list[Place], number: int, budget: int) -> int:
        """How many of the places, whose lengths rise, fit into one call and the budget."""
        if not places:
            return 0
        longest = self._limit(places)
        config = self.sampler.policy.model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None) or math.inf
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

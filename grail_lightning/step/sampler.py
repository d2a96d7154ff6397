"""Sampling and grading of responses, and of continuations of rollouts, with the weights of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from grail_lightning.answers import Verifier
from grail_lightning.batch import GradedBatch, RolloutBatch, SampledBatch, Sampling
from grail_lightning.credit.base import Continuations, Outcomes, Place
from grail_lightning.distributed.sharding import gathered
from grail_lightning.engines import RolloutEngine, build_batch
from grail_lightning.engines.checks import check_logprobs, check_rollouts
from grail_lightning.grading import grade_and_locate
from grail_lightning.policy import Policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.collectives import all_reduce, world_size
from grail_lightning.runtime.seeds import SeedKey, derive_seed, run_seed
from grail_lightning.tasks.base import Prompt, TokenText


def training_key(step: int, sampling: int = 0) -> SeedKey:
    """The key of the random numbers of a training batch, sampled ahead or not.

    Args:
        step: The number of optimiser steps that the policy will have taken when the batch trains.
        sampling: 0, or the number of the further sampling that replaces groups that are all right or all wrong.
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
    """Samples and grades this rank's share of a batch.

    Attributes:
        group_size: The number of responses to each prompt.
        sampling: The sampling options.
        policy: The policy whose weights sample.
        engine: The engine that samples.
        verifier: The verifier that compares answers; the reward is that of the prompt's task.
        clock: The clock of the phases ``sample`` and ``grade``.
        rank: The index of this process among the ranks.
        sampler_cap: `execution.sampler_cap` in training, with which the engine has to report log-probabilities.
    """

    group_size: int
    sampling: Sampling
    policy: Policy
    engine: RolloutEngine
    verifier: Verifier
    clock: PhaseClock
    rank: int
    sampler_cap: float | None = None

    def __call__(self, prompts: list[Prompt], key: SeedKey | list[int]) -> GradedBatch:
        """Graded responses with located answers, from the present weights.

        Args:
            prompts: This rank's prompts.
            key: The key of the random numbers, together with the run's seed and the rank; or a list with the seed of
                each row.
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
        seed = derive_seed(run_seed(), *key, self.rank) if isinstance(key, tuple) else key
        batch = sample_rollouts(self.engine, self.policy, prompts, self.group_size, self.sampling, seed)
        # The engine's class should have told before; this is the latest moment at which nothing is lost.
        check_logprobs(self.engine, self.sampler_cap, reports=not len(batch) or batch.sampling_logprobs is not None)
        return self.numbered(batch)

    def numbered(self, batch: SampledBatch) -> SampledBatch:
        """The batch with row numbers of the whole step: a rollout has the same one for any number of ranks."""
        group, place = batch.row // self.group_size, batch.row % self.group_size
        return batch.replace(row=(group * world_size() + self.rank) * self.group_size + place)

    @torch.no_grad()
    def grade(self, sampled: SampledBatch) -> GradedBatch:
        """The responses with their rewards and the positions of their answers."""
        with self.clock.phase("grade"):
            return grade_and_locate(sampled, self.verifier, self.policy.tokenizer)


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
    ) -> tuple[list[Outcomes | None], int]:
        """See `Continuations.draw`. Calls of the engine are filled from the earliest place on."""
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
            prompt = batch.attention_mask[row, : batch.prompt_width].nonzero().flatten()
            ids = [*batch.input_ids[row, prompt].tolist(), *batch.response_ids[row, :length].tolist()]
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

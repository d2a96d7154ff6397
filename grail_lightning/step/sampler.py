"""Sampling and grading of responses, with the weights of the policy."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from grail_lightning.answers import Verifier
from grail_lightning.batch import GradedBatch, SampledBatch, Sampling
from grail_lightning.distributed.sharding import gathered
from grail_lightning.engines import RolloutEngine
from grail_lightning.engines.checks import check_logprobs, sample_rollouts
from grail_lightning.grading import grade_and_locate
from grail_lightning.policy import Policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.collectives import world_size
from grail_lightning.runtime.seeds import SeedKey, derive_seed, run_seed
from grail_lightning.tasks.base import Prompt


def training_key(step: int, sampling: int = 0) -> SeedKey:
    """The key of the random numbers of a training batch, sampled ahead or not.

    Args:
        step: The number of optimiser steps that the policy will have taken when the batch trains.
        sampling: 0, or the number of the further sampling that replaces groups that are all right or all wrong.
    """
    return "train", step, sampling


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Samples and grades this rank's share of a batch.

    Attributes:
        group_size: The number of responses to each prompt.
        sampling: The sampling options.
        policy: The policy whose weights sample.
        engine: The engine that samples.
        verifier: The verifier that grades the answers.
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
        """Responses from the weights that were pushed last; arguments as above.

        Raises:
            ValueError: If the engine reports no log-probabilities, and the update needs them.
        """
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

"""Sampling and grading of responses with the weights of the policy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from grail_lightning.answers.records import AnswerVerifier
from grail_lightning.answers.spans import unknown_ids
from grail_lightning.core.distributed.sharding import gathered
from grail_lightning.core.engines.base import RolloutEngine, longest_row, on_any_rank
from grail_lightning.core.engines.checks import check_logprobs, check_rollouts
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch, Sampling
from grail_lightning.core.rollout.grading import TaskVerifiers, grade_and_locate
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.collectives import world_size
from grail_lightning.core.runtime.seeds import SeedKey, derive_seed, run_seed


def training_key(step: int, sampling: int = 0) -> SeedKey:
    """The key of the random numbers of a training batch, sampled ahead or not.

    The policy will have taken `step` optimiser steps when the batch trains, or fewer if the one before trains nothing
    (`sample_ahead`). `sampling` is 0, or the number of the further sampling that replaces dead groups.
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
    policy: Policy  # The engine samples with its weights.
    engine: RolloutEngine
    verifier: AnswerVerifier | TaskVerifiers  # It compares answers; the reward is that of the prompt's task.
    clock: PhaseClock  # Of the phases ``sample`` and ``grade``.
    rank: int  # The index of this process among the ranks.
    sampler_cap: float | None = None  # `execution.sampler_cap` in training; it needs log-probabilities of the engine.

    def __call__(self, prompts: list[Prompt], key: SeedKey | list[int]) -> GradedBatch:
        """Graded responses to this rank's prompts, from the present weights.

        A seed is derived from the `key`, the run's seed, and the rank (with environments the number of each row). A
        list holds the seed of each row instead.
        """
        gathering = nullcontext() if self.engine.copies_weights else gathered(self.policy)
        with self.clock.phase("sample"), gathering:
            self.update_weights()
            sampled = self.generate(prompts, key)
        return self.grade(sampled)

    @torch.no_grad()
    def update_weights(self) -> None:
        """Give the engine the present weights. Every rank must call it."""
        self.engine.update_weights(self.policy)

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], key: SeedKey | list[int]) -> SampledBatch:
        """Responses from the weights that the engine was given last; arguments as above."""
        arguments = self.engine, self.policy, prompts, self.group_size, self.sampling
        several_turns = any(prompt.task.has_environment for prompt in prompts)
        if on_any_rank(several_turns, self.engine, self.policy.device):
            from grail_lightning.core.step.episodes import play

            rows = self.row_numbers(torch.arange(len(prompts) * self.group_size)).tolist()
            seeds = [derive_seed(run_seed(), *key, row) for row in rows] if isinstance(key, tuple) else key
            batch = play(*arguments, seeds)
            check_rollouts(self.engine, batch, *arguments[1:])
        else:
            seed = derive_seed(run_seed(), *key, self.rank) if isinstance(key, tuple) else key
            batch = sample_rollouts(*arguments, seed)
        # `RolloutEngine.reports_logprobs` was checked before the run; here the batch itself is, before any update.
        check_logprobs(self.engine, self.sampler_cap, reports=not len(batch) or batch.sampling_logprobs is not None)
        return batch.replace(row=self.row_numbers(batch.row))

    @property
    def longest_row(self) -> float:
        """The tokens that engine and policy have room for, prompt and response together; infinite without a limit."""
        return longest_row(self.engine, self.policy)

    @torch.no_grad()
    def responses(
        self, prompts: Sequence[Prompt], number: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """`number` responses of one turn to each prompt, from the weights that the engine has; one seed for each."""
        return sample_rollouts(self.engine, self.policy, prompts, number, sampling, seeds)

    def row_numbers(self, rows: Tensor) -> Tensor:
        """The numbers within the training step of some rows of this rank, the same for any number of ranks."""
        group, place = rows // self.group_size, rows % self.group_size
        return (group * world_size() + self.rank) * self.group_size + place

    @torch.no_grad()
    def grade(self, sampled: SampledBatch) -> GradedBatch:
        """The responses with their rewards and the positions of their answers."""
        with self.clock.phase("grade"):
            graded = grade_and_locate(sampled, self.verifier, self.policy.tokenizer)
        _warn_of_unknown_tokens(graded, self.policy)
        return graded


_POLICIES_TOLD: WeakSet[Policy] = WeakSet()  # The policies of whose unknown tokens a warning has told.


def _warn_of_unknown_tokens(batch: GradedBatch, policy: Policy) -> None:
    """Warn once, on the rank that sampled them, of tokens that the policy's tokenizer does not know."""
    rows = [row for row, verdict in enumerate(batch.verdicts) if verdict.status == "unknown_tokens"]
    if not rows or policy in _POLICIES_TOLD:
        return
    _POLICIES_TOLD.add(policy)
    sampled = torch.unique(batch.response_ids[batch.response_mask])
    ids = sorted(unknown_ids(policy.tokenizer, sampled.tolist()))
    named = ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    warnings.warn(
        f"The policy sampled ids that its tokenizer does not know ({named}) in {len(rows)} of the {len(batch)} "
        f"rollouts of a batch. The tokenizer has {len(policy.tokenizer)} entries, but the model's head has "
        f"{policy.head_rows} rows. These ids decode to nothing: such a rollout is not right, its reward is at most 0, "
        "and `verdict/unknown_tokens` is their share. A trained model hardly ever samples one; if the share does not "
        "fall, look whether the tokenizer is the model's own.",
        stacklevel=2,
    )

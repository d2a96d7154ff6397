"""A credit method with a service of its own: the reward of the policy's most likely response is the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from grail_lightning import Policy, Prompt, RolloutBatch
from grail_lightning.credit import CreditContext, RolloutSampler, RunParts, Service, TokenCredit, TokenWeights


class GreedyResponses(Service):
    """Responses of temperature 0 by the policy with its present weights, graded like rollouts."""

    uses_engine = True

    def __init__(self, sampler: Callable[[], RolloutSampler]) -> None:
        self._sampler = sampler

    @classmethod
    def open(cls, owner: object, run: RunParts) -> Self:
        """Greedy responses by the sampler of training."""
        return cls(run.sampler)

    def rewards(self, prompts: Sequence[Prompt]) -> Tensor:
        """The rewards ``[K]`` of the greedy responses to some prompts. Every rank must call it."""
        sampler = self._sampler()
        sampler.update_weights()
        sampling = replace(sampler.sampling, temperature=0.0)
        return sampler.grade(sampler.responses(prompts, 1, sampling, [0] * len(prompts))).rewards


class ReMax(TokenCredit):
    r"""The reward of a rollout less that of the greedy response to its prompt, for all of its tokens.

    .. math:: A_i = r_i - r(\text{greedy})

    Source: ReMax, arXiv 2310.10505.
    """

    services = (GreedyResponses,)
    replaces_advantage = True  # So `model.advantage` is refused, which would have no effect.

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0, and the whole advantage as an additive stage."""
        groups, number = torch.unique(batch.group, return_inverse=True)
        first = [int((batch.group == group).nonzero()[0]) for group in groups]
        greedy = context.service(GreedyResponses).rewards([batch.prompts[row] for row in first])
        advantages = (batch.rewards - greedy[number])[:, None] * batch.response_mask
        metrics = {"greedy_reward": float(greedy.mean())}
        return TokenWeights.whole(advantages.to(batch.advantages.dtype), batch.response_mask, metrics=metrics)

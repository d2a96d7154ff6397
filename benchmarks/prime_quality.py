"""PRIME in benchmarks/credit_quality.py: its reward model is first trained on rollouts of other problems.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import PRIME, CreditContext, PermutedRewards, TokenCredit
from grail_lightning.credit.base import TokenWeights
from grail_lightning.credit.measure import logprobs
from grail_lightning.policy import Policy
from grail_lightning.policy.reference import Reference
from grail_lightning.step.second_model import TrainedModel

LEARNING_RATE = 1e-4


class TrainedPRIME(TokenCredit):
    """PRIME, whose reward model has taken a step on each of some batches before the first call, and takes more.

    The rewards of a batch are those from before the step on it. The policy does not change, and is the reference.

    Args:
        rollouts: A function from the policy to the batches.
        permuted: Whether outcomes are permuted within each group, in training and after it: a control.
    """

    def __init__(self, rollouts: Callable[[Policy], Iterable[RolloutBatch]], *, permuted: bool = False) -> None:
        self.rollouts = rollouts
        # All groups with both outcomes.
        prime = PRIME(
            accuracy=(0.01, 0.99), optimizer=lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, weight_decay=0.0)
        )
        self.credit = PermutedRewards(prime) if permuted else prime
        self.figures: list[str] = []
        self._models: tuple[TrainedModel, Reference] | None = None

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch."""
        second, reference = self._trained(policy, context)
        return self.credit(policy, batch, replace(context, reference=reference, second=second))

    def token_reward(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, T]``: the log-ratio of each token alone, towards what the response earned: negated in wrong ones."""
        second, reference = self._trained(policy, context)
        rows = torch.arange(len(batch))
        own, other = (logprobs(model, batch, context, rows) for model in (second.beside(policy), reference.policy))
        self(policy, batch, context)  # The next batch finds a model that has learned from this one.
        return (own - other) * (2 * batch.correct.float() - 1)[:, None]

    def _trained(self, policy: Policy, context: CreditContext) -> tuple[TrainedModel, Reference]:
        """The reward model, which the first call trains, and the reference."""
        if self._models is None:
            model = copy.deepcopy(policy).requires_grad_(True).train()
            second = TrainedModel(model, self.credit.needs().training, SingleDeviceStrategy("cpu"), 1.0)
            self._models = second, Reference(copy.deepcopy(policy).requires_grad_(False))
            for number, earlier in enumerate(self.rollouts(policy), start=1):
                found = self(policy, earlier, replace(context, step=number))
                loss, right = (found.metrics[f"reward_model_{name}"] for name in ("loss", "accuracy"))
                self.figures.append(f"{loss.total / loss.size:.3f} {right.total / right.size:.2f}")
        return self._models

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
        self._second: TrainedModel | None = None
        self._reference: Reference | None = None

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of a batch."""
        if self._second is None:
            self._reference = Reference(copy.deepcopy(policy).requires_grad_(False))
            model = copy.deepcopy(policy).requires_grad_(True).train()
            self._second = TrainedModel(model, self.credit.training, SingleDeviceStrategy("cpu"), 1.0)
            for number, earlier in enumerate(self.rollouts(policy), start=1):
                found = self._weigh(policy, earlier, replace(context, step=number))
                loss, right = (found.metrics[f"reward_model_{name}"] for name in ("loss", "accuracy"))
                self.figures.append(f"{loss.total / loss.size:.3f} {right.total / right.size:.2f}")
        return self._weigh(policy, batch, context)

    def token_reward(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
        """``[B, T]``: the process reward of each token alone, negative in right rollouts."""
        scores = self(policy, batch, context).scores
        assert scores is not None
        return scores

    def _weigh(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        given = replace(context, reference=self._reference, second=self._second)
        return self.credit(policy, batch, given)

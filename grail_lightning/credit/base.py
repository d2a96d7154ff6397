"""What a credit method gets and gives.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from grail_lightning.policy import Policy
from grail_lightning.rollout import RolloutBatch, TokenWeights

Refresh = Literal["rollout", "update"]


@dataclass(frozen=True, kw_only=True)
class CreditContext:
    """What a method may need beside policy and rollouts.

    Attributes:
        step: Optimiser steps taken before this batch.
        generator: Keyed by seed and step; `row_generator` keys it further, so that weights do not depend on how rows
            are ordered, padded or cut into micro-batches.
        token_budget: Most padded tokens in a forward pass.
        temperature: The sampling temperature; logits are divided by it.
    """

    step: int
    generator: torch.Generator
    token_budget: int
    temperature: float = 1.0

    def row_generator(self, row: int) -> torch.Generator:
        """A generator of one row's own, by the row's identity in the step (`RolloutBatch.row`)."""
        key = f"{self.generator.initial_seed()} {row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)


class TokenCredit(ABC):
    """Shares a rollout's advantage out among its tokens.

    A subclass implements `__call__`; its constructor arguments become options on the command line
    (``--model.credit=package.module.Name --model.credit.option=value``).
    """

    refresh: Refresh = "rollout"
    """Whether weights are computed once for a batch of rollouts, or anew before every optimiser step."""

    @abstractmethod
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights for `batch`, whose rewards, advantages and answer masks are set. Must not write into it."""


class CreditControl(ABC):
    """A control experiment around the configured credit: takes its weights and returns others."""

    @abstractmethod
    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of the control. Must not write into the arguments."""


class Uniform(TokenCredit):
    """Every token gets the rollout's advantage: plain GRPO, bit for bit."""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on every response token."""
        return uniform_weights(batch)


def uniform_weights(batch: RolloutBatch) -> TokenWeights:
    """Weight 1 on the valid tokens."""
    none = torch.zeros(len(batch), dtype=torch.bool, device=batch.response_mask.device)
    return TokenWeights(values=batch.response_mask.float(), fallback=none)

"""What a credit method gets and gives.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from grail_lightning.batch import AnswerMasks, RolloutBatch
from grail_lightning.policy import Policy

if TYPE_CHECKING:
    from grail_lightning.credit.saliency import SaliencyCredit

Refresh = Literal["rollout", "update"]


class Mean(NamedTuple):
    """A mean as the two numbers it is made of: ranks may differ in size, so their means cannot be averaged.

    Attributes:
        total: The sum over this rank.
        size: How many rows or tokens were added up; 0 where there was none.
    """

    total: float
    size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """Credit of each token.

    Attributes:
        values: ``[B, T]``, multiplies the rollout's advantage; zero outside the response mask.
        scores: ``[B, T]``, the raw scores from which the weights are made, if there are any.
        additive: ``[B, T]``, added to the token's advantage after the product, if the method has such a stage.
        fallback: ``[B]`` bool, rows to which the method applied but could not (no complete box): their weight is 1.
        answer: The answer's tokens as the method located them; None if it took those of the batch.
        metrics: Further figures to log under ``credit/``: a number is a mean over this rank's rows, or one that all
            ranks share; means over anything else, such as tokens, are a `Mean`. NaN is no opinion.
        parts: The weights of the methods that this one is made of, if any (`weigh_part`).
    """

    values: Tensor
    fallback: Tensor
    scores: Tensor | None = None
    additive: Tensor | None = None
    answer: AnswerMasks | None = None
    metrics: Mapping[str, float | Mean] = field(default_factory=dict)
    parts: tuple[TokenWeights, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CreditContext:
    """What a method may need beside policy and rollouts.

    Attributes:
        step: Optimiser steps taken so far.
        generator: Keyed by seed and step; `row_generator` keys it further, so that weights do not depend on how rows
            are ordered, padded or cut into micro-batches.
        token_budget: Most tokens in a forward pass.
        temperature: The sampling temperature; logits are divided by it.
        earlier: What the method gave before the first optimiser step of this batch, when it is asked anew before a
            later one; None in the first call for a batch.
    """

    step: int
    generator: torch.Generator
    token_budget: int
    temperature: float = 1.0
    earlier: TokenWeights | None = None

    def row_generator(self, row: int) -> torch.Generator:
        """A generator of one row's own, by the row's identity in the step (`RolloutBatch.row`)."""
        key = f"{self.generator.initial_seed()} {row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)


class TokenCredit(ABC):
    """Shares a rollout's advantage out among its tokens.

    A subclass implements `__call__`; `grail_lightning.credit.weigh.check_weights` says what it may return. Arguments of
    its constructor become options: ``--model.credit=package.module.Name --model.credit.option=value``.
    """

    refresh: Refresh = "rollout"
    """Whether weights are computed once for a batch of rollouts, or anew before every optimiser step.

    A method that is made of others asks each by `weigh_part`, which keeps the `refresh` of each.
    """

    @abstractmethod
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights for `batch`, whose rewards, advantages and answer masks are set. Must not write into it."""

    def as_saliency_credit(self) -> SaliencyCredit | None:
        """The method as a function of saliency that the update's forward pass may give; None if it is none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the method has to remember in a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint remembers; it may be another method's, or nothing."""
        del state  # Most methods have none.


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

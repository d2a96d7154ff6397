"""The interface of credit methods and controls: their inputs and their results.

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
from grail_lightning.credit.continuations import Continuations
from grail_lightning.credit.second_model import SecondModel, Training
from grail_lightning.policy import Policy
from grail_lightning.policy.reference import Reference

if TYPE_CHECKING:
    from grail_lightning.credit.saliency import SaliencyCredit

Refresh = Literal["rollout", "update"]


class Mean(NamedTuple):
    """A mean as a sum and a count. Ranks may differ in their counts, so their means cannot be averaged.

    Attributes:
        total: The sum over this rank.
        size: The number of rows or tokens in the sum; 0 if there is none.
    """

    total: float
    size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """The credit of each token.

    Attributes:
        values: ``[B, T]``, at least 0: multiplies the rollout's advantage; zero outside the response mask.
        scores: ``[B, T]``, the raw scores from which the weights are computed, if there are any.
        additive: ``[B, T]``, the additive stage: added to the token's advantage after the product; None without one.
        fallback: ``[B]`` bool, rows to which the method applies but which lack what it needs (a complete box): their
            weight is 1.
        answer: The answer's tokens as the method located them; None if it used those of the batch.
        metrics: Further figures to log under ``credit/``. A number is a mean over this rank's rows, or a figure that is
            equal on all ranks; a mean over anything else, such as tokens, is a `Mean`. NaN is left out.
        parts: The weights of the inner methods of a composed method (`weigh_part`).
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
    """The inputs of a method beside policy and rollouts.

    Attributes:
        step: The number of optimiser steps taken so far.
        generator: A generator keyed by seed and step. `row_generator` adds the row to the key, so that weights do not
            depend on how rows are ordered, padded or cut into micro-batches.
        token_budget: Most tokens in a forward pass.
        temperature: The sampling temperature; logits are divided by it.
        reference: The frozen policy before training; None unless the run has one (`TokenCredit.needs_reference`).
        continuations: What samples continuations of rollouts; None outside of a run.
        second: The model that the run trains for the method (`TokenCredit.training`); None outside of `fit`.
        earlier: The weights of the previous call for this batch, if the method is called again before a further
            optimiser step; None in the first call for a batch.
    """

    step: int
    generator: torch.Generator
    token_budget: int
    temperature: float = 1.0
    reference: Reference | None = None
    continuations: Continuations | None = None
    second: SecondModel | None = None
    earlier: TokenWeights | None = None

    def row_generator(self, row: int) -> torch.Generator:
        """A generator for one row, keyed by the row's identity in the step (`RolloutBatch.row`)."""
        key = f"{self.generator.initial_seed()} {row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)


class TokenCredit(ABC):
    """A method that distributes a rollout's advantage over its tokens.

    A subclass implements `__call__`. If its weights are a function of saliency, it is a subclass of `SaliencyCredit`
    instead, which has a `__call__` already. `grail_lightning.credit.weigh.check_weights` lists what it may return. The
    arguments of its constructor become options: ``--model.credit=package.module.Name --model.credit.option=value``.
    """

    refresh: Refresh = "rollout"
    """Whether weights are computed once for a batch of rollouts, or again before every optimiser step.

    A composed method calls its inner methods through `weigh_part`, which applies the `refresh` of each.
    """

    needs_reference: bool = False
    """Whether the method reads `CreditContext.reference`. The run then keeps the policy before training."""

    needs_continuations: bool = False
    """Whether the method reads `CreditContext.continuations`."""

    training: Training | None = None
    """The options of a second model that the run trains for the method, as `CreditContext.second`; None without one."""

    @abstractmethod
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights for `batch`, whose rewards, advantages and answer masks are set. Must not write into the batch."""

    def as_saliency_credit(self) -> SaliencyCredit | None:
        """The method as a function of saliency scores that the update's first forward pass can provide, or None.

        A method that is refreshed before every optimiser step returns None, since there is one such pass a batch.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The method's state for a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint. It may be empty or another method's."""
        del state  # Most methods have no state.


class CreditControl(ABC):
    """A control experiment: it takes the weights of the configured method and returns others."""

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

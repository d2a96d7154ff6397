"""What a credit method gets and gives.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from grail_lightning.checks import Claim, check_claims, check_tensor
from grail_lightning.policy import Policy
from grail_lightning.rollout import Mean, RolloutBatch, TokenWeights

Refresh = Literal["rollout", "update"]
Leaf = Literal["embeddings", "first", "middle", "last"]
Alignment = Literal["predictor", "token"]


@dataclass(frozen=True, kw_only=True)
class CreditContext:
    """What a method may need beside policy and rollouts.

    Attributes:
        step: Optimiser steps taken so far.
        generator: Keyed by seed and step; `row_generator` keys it further, so that weights do not depend on how rows
            are ordered, padded or cut into micro-batches.
        token_budget: Most padded tokens in a forward pass.
        temperature: The sampling temperature; logits are divided by it.
        scores: ``[B, T]``, what the method `explains`, where the update's own forward pass has found it; None: the
            method computes it itself.
        earlier: What the method gave before the first optimiser step of this batch, when it is asked anew before a
            later one; None in the first call for a batch.
    """

    step: int
    generator: torch.Generator
    token_budget: int
    temperature: float = 1.0
    scores: Tensor | None = None
    earlier: TokenWeights | None = None

    def row_generator(self, row: int) -> torch.Generator:
        """A generator of one row's own, by the row's identity in the step (`RolloutBatch.row`)."""
        key = f"{self.generator.initial_seed()} {row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Which saliency a method asks for.

    Attributes:
        objective: ``[B, T]`` bool, the tokens whose likelihood is explained.
        rows: ``[B]`` bool, the rows that are wanted.
        leaf: embeddings, or the output of a block: first (block 1), middle (n // 2), last (n − 1), or its number.
        alignment: predictor reads for token t the position t − 1, which predicts it; token reads t itself.
    """

    objective: Tensor
    rows: Tensor
    leaf: Leaf | int = "embeddings"
    alignment: Alignment = "predictor"


class TokenCredit(ABC):
    """Shares a rollout's advantage out among its tokens.

    A subclass implements `__call__`; `check_weights` says what it may return. Its constructor arguments become options
    on the command line (``--model.credit=package.module.Name --model.credit.option=value``).
    """

    refresh: Refresh = "rollout"
    """Whether weights are computed once for a batch of rollouts, or anew before every optimiser step.

    A method that is made of others asks each by `weigh_part`, which keeps the `refresh` of each.
    """

    @abstractmethod
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights for `batch`, whose rewards, advantages and answer masks are set. Must not write into it."""

    def explains(self, policy: Policy, batch: RolloutBatch) -> Explained | None:
        """The saliency that `__call__` needs, if the update may find it beside its forward pass; None: it may not.

        `__call__` is then given it as `CreditContext.scores`, for a few rows at a time: only a method whose weights of
        a row depend on that row alone may ask.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the method has to remember in a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint remembers; it may be another method's, or nothing."""
        del state  # Most methods have none.


def weigh(credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
    """The weights of a method, checked by `check_weights`: it may be anybody's."""
    weights = credit(policy, batch, context)
    check_weights(credit, weights, batch)
    return weights


def check_weights(giver: TokenCredit | CreditControl, weights: Any, batch: RolloutBatch) -> None:
    """Whether these are token weights for `batch`; waits for the device once.

    Args:
        giver: The method or control that returned them, for the message.
        weights: What it returned.
        batch: ``B`` rows of ``T`` response tokens.

    Raises:
        ValueError: If it is no `TokenWeights`; if a tensor in it is not of the right dtype, shape and device, requires
            a gradient or holds what is not finite; if `values` are negative; if `values` or `additive` are not zero
            outside the response mask; or if a metric is not a number.
    """
    name, mask = f"`{type(giver).__name__}`", batch.response_mask
    if not isinstance(weights, TokenWeights):
        raise ValueError(
            f"{name} must return a `TokenWeights`, but got {type(weights).__name__}. "
            "Return `TokenWeights(values=…, fallback=…)`, of grail_lightning.credit."
        )
    given: dict[str, Tensor] = {"values": weights.values}
    optional = {"scores": weights.scores, "additive": weights.additive}
    given |= {field: tensor for field, tensor in optional.items() if tensor is not None}
    for field, tensor in given.items():
        check_tensor(f"{name} must return `{field}`", tensor, "floating-point", mask.shape, mask.device)
    check_tensor(f"{name} must return `fallback`", weights.fallback, "bool", mask.shape[:1], mask.device)
    claims = [Claim(f"{name} must return finite `{f}`", ~tensor.isfinite(), tensor) for f, tensor in given.items()]
    claims.append(Claim(f"{name} must return `values` of at least 0", weights.values < 0, weights.values))
    claims += [
        Claim(f"{name} must return `{f}` that are 0 outside `batch.response_mask`", (tensor != 0) & ~mask, tensor)
        for f, tensor in given.items()
        if f != "scores"
    ]
    check_claims(claims, "See `batch.texts` of that row; `.masked_fill(~batch.response_mask, 0)` clears padding.")
    for metric, value in weights.metrics.items():
        if not isinstance(value, (Mean, Real)):
            raise ValueError(
                f"{name} must return `metrics` that are numbers or `Mean(total, size)`, but got {type(value).__name__} "
                f"for `{metric}`. Call `.item()` of a tensor."
            )


def weigh_part(
    credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext, part: int = 0
) -> TokenWeights:
    """The weights of a method inside another one, where it keeps its own `refresh`.

    Args:
        credit: The inner method.
        policy: As for `TokenCredit`.
        batch: Likewise.
        context: Of the outer method.
        part: The place of these weights in the `TokenWeights.parts` that the outer method gives.
    """
    # An outer method of somebody else's may keep no parts.
    parts = () if context.earlier is None else context.earlier.parts
    earlier = parts[part] if part < len(parts) else None
    if earlier is not None and credit.refresh == "rollout":
        return earlier
    return weigh(credit, policy, batch, replace(context, earlier=earlier))


def explained_by(credit: TokenCredit, policy: Policy, batch: RolloutBatch) -> Explained | None:
    """What `credit` explains, if the class that says so has all of its say: a subclass may make other weights of it."""
    family = type(credit).__mro__
    says = next(place for place, cls in enumerate(family) if "explains" in vars(cls))
    overridden = {name for cls in family[:says] for name, member in vars(cls).items() if callable(member)}
    return None if overridden - {"__init__"} else credit.explains(policy, batch)


class CreditControl(ABC):
    """A control experiment around the configured credit: takes its weights and returns others."""

    @abstractmethod
    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of the control. Must not write into the arguments."""


def controlled(
    control: CreditControl, weights: TokenWeights, batch: RolloutBatch, context: CreditContext
) -> TokenWeights:
    """What a control makes of token weights, checked by `check_weights`; parts stay those of the method."""
    changed = control(weights, batch, context)
    check_weights(control, changed, batch)
    return replace(changed, parts=weights.parts)


class Uniform(TokenCredit):
    """Every token gets the rollout's advantage: plain GRPO, bit for bit."""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on every response token."""
        return uniform_weights(batch)


def uniform_weights(batch: RolloutBatch) -> TokenWeights:
    """Weight 1 on the valid tokens."""
    none = torch.zeros(len(batch), dtype=torch.bool, device=batch.response_mask.device)
    return TokenWeights(values=batch.response_mask.float(), fallback=none)

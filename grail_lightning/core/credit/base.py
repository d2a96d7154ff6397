"""The interface of credit methods and controls: what they are given, and what they return.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.credit.service import Opened, S, Service
from grail_lightning.core.functional.tokens import masked_sum
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import AnswerMasks, RolloutBatch
from grail_lightning.core.runtime.checks import Claim, check_claims, check_tensor
from grail_lightning.core.runtime.pages import page

Refresh = Literal["batch", "step"]

# --- what a method returns --------------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean as a sum and a count. Ranks may differ in their counts, so their means cannot be averaged."""

    total: float  # The sum over this rank.
    size: float  # The number of rows or tokens in the sum; 0 if there is none.

    @classmethod
    def over(cls, values: Tensor, mask: Tensor) -> Mean:
        """The mean of the values where a mask is True; both have one shape."""
        return cls(float(masked_sum(values, mask)), float(mask.sum()))

    @classmethod
    def share(cls, flags: Tensor) -> Mean:
        """The share of True in a bool tensor."""
        return cls(float(flags.sum()), float(flags.numel()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWeights:
    """The credit of each token.

    Attributes:
        values: ``[B, T]``, at least 0: multiplies the rollout's advantage; zero outside the response mask.
        scores: ``[B, T]``, the raw scores from which the weights are computed, if there are any.
        additive: ``[B, T]``, the additive stage: added to the token's advantage after the product; None without one.
        fallback: ``[B]`` bool, rows to which the method applies but which lack what it needs (a complete box): their
            weight is 1. If it is not given, there are none. Their share is logged as `credit/span_missing`.
        answer: The answer's tokens as the method located them; None if it used those of the batch.
        unscaled: ``[B, T]``, what `values` were before the method scaled each row to the mean 1; None if it has not.
            Controls that replace weights do so there, and scale again.
        metrics: Further figures to log under ``credit/``. A number is a mean over this rank's rows, or a figure that is
            equal on all ranks; a mean over anything else, such as tokens, is a `Mean`. NaN is left out.
    """

    values: Tensor
    fallback: Tensor = None  # type: ignore[assignment]
    scores: Tensor | None = None
    additive: Tensor | None = None
    answer: AnswerMasks | None = None
    unscaled: Tensor | None = None
    metrics: Mapping[str, float | Mean] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing: object = self.fallback
        if missing is None:
            object.__setattr__(self, "fallback", self.values.new_zeros(len(self.values), dtype=torch.bool))

    def to(self, device: torch.device | str) -> TokenWeights:
        """A copy with every tensor on `device`."""
        tensors: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
        answer = self.answer
        if answer is not None:
            answer = AnswerMasks(**{f.name: getattr(answer, f.name).to(device) for f in fields(answer)})
        return replace(self, **tensors, answer=answer)

    @classmethod
    def whole(
        cls,
        advantages: Tensor,
        mask: Tensor,
        *,
        fallback: Tensor | None = None,
        scores: Tensor | None = None,
        metrics: Mapping[str, float | Mean] | None = None,
    ) -> TokenWeights:
        """Weights of a method whose additive stage is the whole advantage: weight 0, and `advantages` ``[B, T]`` added.

        Rows of `fallback` ``[B]`` bool keep the advantage of the rollout: weight 1 on `mask` ``[B, T]`` and 0 added.
        """
        if fallback is None:
            fallback = mask.new_zeros(len(mask))
        added = advantages.masked_fill(~mask | fallback[:, None], 0)
        values = (mask & fallback[:, None]).to(added.dtype)
        return cls(values=values, additive=added, fallback=fallback, scores=scores, metrics=metrics or {})

    @property
    def before_scale(self) -> Tensor:
        """``[B, T]``: the weights before the method scaled rows to the mean 1, if it has."""
        return self.values if self.unscaled is None else self.unscaled

    def changed(self, change: Callable[[Tensor], Tensor]) -> TokenWeights:
        """The weights with a function applied to `values` and the additive stage; the other fields stay as they are."""
        additive = None if self.additive is None else change(self.additive)
        return replace(self, values=change(self.values), additive=additive)


def token_advantages(advantages: Tensor, weights: TokenWeights) -> Tensor:
    """``A_it = A_i · w_it``, plus the additive stage if there is one, ``[B, T]``."""
    product = advantages[:, None] * weights.values
    return product if weights.additive is None else product + weights.additive


def uniform_weights(batch: RolloutBatch) -> TokenWeights:
    """Weight 1 on the tokens of the response, 0 elsewhere."""
    return TokenWeights(values=batch.response_mask.float())


def toward_outcome(added: Tensor, batch: RolloutBatch) -> Tensor:
    """``[B, T]``: scores toward the outcome: what was given to a right response, or taken from a wrong one."""
    return (2 * batch.correct.to(added) - 1)[:, None] * added


def rows_by_group(batch: RolloutBatch) -> list[Tensor]:
    """The rows of each group, in the order of their identities, so that the order in the batch does not matter."""
    order = batch.row.argsort()
    return [order[batch.group[order] == group] for group in sorted(set(batch.group.tolist()))]


def one_elsewhere(values: Tensor, weighed: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]``: the values on the tokens that a method weighs, weight 1 on the others of the mask, 0 outside it."""
    return torch.where(weighed, values, mask.to(values.dtype))


# --- what a method is given -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CreditContext:
    """The inputs of a method beside policy and rollouts.

    Attributes:
        step: The number of optimiser steps taken so far.
        generator: A generator keyed by seed and step. `row_generator` adds the row to the key, so that weights do not
            depend on how rows are ordered, padded or cut into micro-batches.
        token_budget: Most tokens in a forward pass.
        temperature: The sampling temperature; logits are divided by it.
        services: The open services of the run, by their class; `service` returns one of them.
    """

    step: int
    generator: torch.Generator
    token_budget: int
    temperature: float = 1.0
    services: Opened = field(default_factory=dict)

    def service(self, kind: type[S]) -> S:
        """The open service of a class; a ValueError if the run has not opened it."""
        service = self.services.get(kind)
        if not isinstance(service, kind):
            names = ", ".join(opened.__name__ for opened in self.services) or "none"
            raise ValueError(
                f"`CreditContext.service` must be asked for an open service, but got `{kind.__name__}`, and open are: "
                f"{names}. A run opens those in `services` of its credit method, its estimator and its objective"
                + (", and one that trains a model in `fit` alone" if kind.trains_model else "")
                + ". List it there, or set `model.credit` to another method."
            )
        return service

    def row_generator(self, row: int) -> torch.Generator:
        """A generator for one row, keyed by the row's identity in the training step (`RolloutBatch.row`)."""
        key = f"{self.generator.initial_seed()} {row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        return torch.Generator().manual_seed(seed)


# --- methods and controls ---------------------------------------------------------------------------------------------


class TokenCredit(ABC):
    """A method that distributes a rollout's advantage over its tokens.

    A subclass implements `__call__`. If its weights are a function of saliency, it is a subclass of `SaliencyCredit`
    instead, which has a `__call__` already. `check_weights` lists what it may return. The arguments of its constructor
    become options: ``--model.credit=package.module.Name --model.credit.option=value``.

    Raises:
        ValueError: If a subclass defines `needs`, which nothing calls; `services` and what follows it replace it.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "needs" in vars(cls):
            raise ValueError(
                f"`{cls.__name__}` must say what it uses in `services`, `refresh`, `fuses` and `replaces_advantage`, "
                f"but got a method `needs`, which nothing calls. See {page('your_credit.md')}."
            )

    @abstractmethod
    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights for `batch`, whose rewards, advantages and answer masks are set. Must not write into the batch."""

    @property
    def services(self) -> tuple[type[Service], ...]:
        """The classes of the services that it gets from `CreditContext.service`, such as `FrozenReference`."""
        return ()

    @property
    def refresh(self) -> Refresh:
        """When weights are computed: once for a batch of rollouts, or again before every optimiser step."""
        return "batch"

    @property
    def fuses(self) -> bool:
        """Whether the update's first forward passes may provide the saliency of a `SaliencyCredit`.

        `grail_lightning.core.step.fused.method_to_fuse` lists when they do.
        """
        return False

    @property
    def replaces_advantage(self) -> bool:
        """Whether the additive stage is the whole advantage of a token (`TokenWeights.whole`).

        It then has a baseline of its own, over turns or tokens, so an estimator in `model.advantage` is refused.
        """
        return False

    @property
    def runs_policy(self) -> bool:
        """Whether it runs the policy's model; False if it reads tokens, rewards and texts alone.

        Such a method is called without whole weights where they are sharded.
        """
        return True

    @property
    def reads_correct(self) -> bool:
        """Whether it reads `RolloutBatch.correct`, where others read rewards and advantages."""
        return False

    @property
    def reads_reference(self) -> bool:
        """Whether it reads `Prompt.reference`, the reference answer."""
        return False

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """A remark on the sets of training prompts, before a model is loaded; ValueError if none of them can be used.

        Sets make a prompt when it is asked for, so only a method that has a question reads them.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The method's state for a checkpoint: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint. It may be empty or another method's."""
        del state  # Most methods have no state.


class CreditControl(ABC):
    """A control experiment: it takes the weights of the configured method and returns others."""

    @property
    def reads_correct(self) -> bool:
        """See `TokenCredit`."""
        return False

    @abstractmethod
    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The weights of the control. Must not write into the arguments."""


class Uniform(TokenCredit):
    """Every token gets the rollout's advantage, as in GRPO and its relatives; `Objective` says which one it is."""

    runs_policy = False

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on every response token."""
        return uniform_weights(batch)


# --- checks -----------------------------------------------------------------------------------------------------------


def weigh(credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
    """The weights of a method, checked by `check_weights`."""
    weights = credit(policy, batch, context)
    check_weights(credit, weights, batch)
    return weights


def check_weights(giver: TokenCredit | CreditControl, weights: object, batch: RolloutBatch) -> None:
    """Raise a ValueError for what a method or control must not return for `batch`.

    That is no `TokenWeights`; a tensor in it of the wrong dtype, shape or device, that requires a gradient or is not
    finite; negative `values`; `values` or an `additive` stage outside the response mask; a metric that is no number.
    """
    name, mask = f"`{type(giver).__name__}`", batch.response_mask
    if not isinstance(weights, TokenWeights):
        raise ValueError(
            f"{name} must return a `TokenWeights`, but got {type(weights).__name__}. "
            "Return `TokenWeights(values=…)`, of grail_lightning.core.credit."
        )
    tensors: dict[str, Tensor] = {"values": weights.values}
    optional = {"scores": weights.scores, "additive": weights.additive}
    tensors |= {part: tensor for part, tensor in optional.items() if tensor is not None}
    for part, tensor in tensors.items():
        check_tensor(f"{name} must return `{part}`", tensor, "floating-point", mask.shape, mask.device)
    check_tensor(f"{name} must return `fallback`", weights.fallback, "bool", mask.shape[:1], mask.device)
    claims = [Claim(f"{name} must return finite `{f}`", ~tensor.isfinite(), tensor) for f, tensor in tensors.items()]
    claims.append(Claim(f"{name} must return `values` of at least 0", weights.values < 0, weights.values))
    claims += [
        Claim(f"{name} must return `{f}` that are 0 outside `batch.response_mask`", (tensor != 0) & ~mask, tensor)
        for f, tensor in tensors.items()
        if f != "scores"
    ]
    check_claims(claims, "See `batch.texts` of that row; `.masked_fill(~batch.response_mask, 0)` clears padding.")
    for metric, value in weights.metrics.items():
        if not isinstance(value, (Mean, Real)):
            raise ValueError(
                f"{name} must return `metrics` that are numbers or `Mean(total, size)`, but got {type(value).__name__} "
                f"for `{metric}`. Call `.item()` of a tensor."
            )


def check_one_turn(method: object, batch: RolloutBatch, why: str, remedy: str) -> None:
    """Check that no environment answers in these rollouts; `why` the method cannot have that, and what to do."""
    if any(batch.in_environment):
        raise ValueError(
            f"`{type(method).__name__}` {why}, but got rollouts of several turns, in which an environment answers. "
            f"{remedy}"
        )


def check_one_turn_sets(method: object, sets: Sequence[Sequence[Prompt]], why: str, remedy: str) -> None:
    """The same before a run: a set with an environment may be drawn from only after some batches."""
    tasks = [prompts[0].task for prompts in sets if len(prompts)]
    if any(task.has_environment for task in tasks):
        raise ValueError(
            f"`{type(method).__name__}` {why}, but got a training set whose task has an environment. {remedy}"
        )

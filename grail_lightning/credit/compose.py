"""Credit methods that are composed of other methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Needs, TokenCredit, TokenWeights, rows_by_group, weigh
from grail_lightning.credit.saliency import SaliencyCredit, SaliencyTarget
from grail_lightning.policy import Policy
from grail_lightning.runtime.checks import check_options
from grail_lightning.tasks.base import Prompt


class _Around(TokenCredit):
    """A method around another one, which decides what it needs of the run and holds its state."""

    def __init__(self, inner: TokenCredit) -> None:
        self.inner = inner

    def needs(self) -> Needs:
        return replace(self.inner.needs(), saliency=None)

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        return self.inner.check_prompts(sets)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class WarmUp(_Around):
    r"""A linear transition from uniform weights to those of another method.

    .. math:: w_t = 1 + \min(\text{step} / \text{steps},\ 1) \cdot (w^{inner}_t - 1)

    An additive stage is scaled likewise. The inner method runs from the first step on.

    Args:
        inner: The method whose weights are reached.
        steps: The number of optimiser steps until then.
    """

    def __init__(self, inner: TokenCredit, steps: int = 50) -> None:
        super().__init__(inner)
        self.steps = steps
        check_options(self, steps="[1, inf)")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The inner method's weights, interpolated with 1."""
        return self.fade(weigh(self.inner, policy, batch, context), batch, context)

    def fade(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The given weights of the inner method, interpolated with 1."""
        strength = min(context.step / self.steps, 1.0)
        if strength == 1:
            return weights

        def faded(values: Tensor) -> Tensor:
            return (1 + strength * (values - 1)).masked_fill(~batch.response_mask, 0)

        values, unscaled = faded(weights.values), None if weights.unscaled is None else faded(weights.unscaled)
        additive = None if weights.additive is None else strength * weights.additive
        return replace(weights, values=values, additive=additive, unscaled=unscaled)

    def needs(self) -> Needs:
        """What the inner method needs, also of saliency: the transition uses only a token's own weight."""
        inner = self.inner.needs()
        return replace(inner, saliency=None if inner.saliency is None else _FadedSaliency(inner.saliency, self))


class _FadedSaliency(SaliencyCredit):
    """A `WarmUp` around a `SaliencyCredit`, as a `SaliencyCredit`."""

    def __init__(self, inner: SaliencyCredit, warm_up: WarmUp) -> None:
        self.inner, self.warm_up = inner, warm_up

    def target(self, policy: Policy, batch: RolloutBatch) -> SaliencyTarget:
        return self.inner.target(policy, batch)

    def weights_from(self, scores: Tensor, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        return self.warm_up.fade(self.inner.weights_from(scores, policy, batch, context), batch, context)


class Product(TokenCredit):
    r"""Two methods combined: their weights are multiplied, and their additive stages are added.

    .. math:: w_t = w^{first}_t w^{second}_t, \qquad A_t = A\, w_t + a^{first}_t + a^{second}_t

    A row counts as a fallback if either method fell back; the weights of the other method still apply. The combination
    has no scores. Both methods must have the same `refresh`.

    Args:
        first: The first method.
        second: The second method.
    """

    def __init__(self, first: TokenCredit, second: TokenCredit) -> None:
        self.first, self.second = first, second
        if first.needs().training is not None and second.needs().training is not None:
            raise ValueError("Only one of `first` and `second` may train a model, but got two. Replace one of them.")
        if first.needs().refresh != second.needs().refresh:
            raise ValueError(
                f"`first` and `second` must have the same `refresh`, but got {first.needs().refresh} and "
                f"{second.needs().refresh}. Set `saliency.refresh` of `GRAIL` to rollout."
            )

    def needs(self) -> Needs:
        """What either method needs, but no saliency: the product is computed as a whole."""
        one, two = self.first.needs(), self.second.needs()
        return Needs(
            refresh=one.refresh,
            reference=one.reference or two.reference,
            continuations=one.continuations or two.continuations,
            training=one.training or two.training,
        )

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """The remarks of both methods."""
        return " ".join(filter(None, (one.check_prompts(sets) for one in (self.first, self.second))))

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The product of both methods' weights."""
        one, two = (weigh(method, policy, batch, context) for method in (self.first, self.second))
        for method, part in ((self.first, one), (self.second, two)):
            if _all_is_added(part, batch):
                rank_zero_warn(
                    f"`Product` multiplies the weights of two methods, but those of `{type(method).__name__}` are all "
                    "0, since its whole advantage is added: the other method has no effect. Set `model.credit` to one."
                )
        added = [part.additive for part in (one, two) if part.additive is not None]
        metrics = {f"first/{name}": value for name, value in one.metrics.items()}
        metrics |= {f"second/{name}": value for name, value in two.metrics.items()}
        scales = one.unscaled is not None or two.unscaled is not None
        return TokenWeights(
            values=one.values * two.values,
            fallback=one.fallback | two.fallback,
            additive=sum(added[1:], added[0]) if added else None,
            answer=one.answer or two.answer,
            unscaled=one.before_scale * two.before_scale if scales else None,
            metrics=metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """The states of both methods."""
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of each method."""
        self.first.load_state_dict(state.get("first", {}))
        self.second.load_state_dict(state.get("second", {}))


class PermutedRewards(_Around):
    """A control of methods that read rewards: they see those of each group in a random order.

    The responses, their tree, the advantages and each group's histogram of rewards stay the same, without information
    about which response earned which. Where few responses are right, most rare branches then hold wrong ones alone, so
    rarity still shows. With `mirrored` each group's rewards also change sides at random (right for wrong), and the
    expected AUROC of any change of value is 0.5.

    Args:
        inner: The method, such as `TreeAdvantage`. `Resampled` grades its continuations, which no order changes.
        mirrored: Whether rewards also change sides in a random half of the groups.
    """

    def __init__(self, inner: TokenCredit, mirrored: bool = False) -> None:
        super().__init__(inner)
        self.mirrored = mirrored

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The inner method's weights of the batch with permuted rewards and verdicts."""
        order, rewards = torch.arange(len(batch)), batch.rewards.cpu().clone()
        correct = batch.correct.cpu().clone()
        for rows in (rows.cpu() for rows in rows_by_group(batch)):
            generator = context.row_generator(int(batch.row[rows[0]]))
            order[rows] = rows[torch.randperm(len(rows), generator=generator)]
            if self.mirrored and torch.rand(1, generator=generator, dtype=torch.float32) < 0.5:
                rewards[rows] = rewards[rows].max() + rewards[rows].min() - rewards[rows]
                correct[rows] = ~correct[rows]
        permuted = {"rewards": rewards[order].to(batch.rewards.device), "correct": correct[order].to(batch.correct)}
        weights = weigh(self.inner, policy, batch.replace(**permuted), context)
        if _all_is_added(weights, batch):
            rank_zero_warn(
                f"`PermutedRewards` permutes the whole advantage of `{type(self.inner).__name__}`, which is made of "
                "rewards, so that right rollouts are blamed: this is no control of its credit by token."
            )
        return weights


def _all_is_added(weights: TokenWeights, batch: RolloutBatch) -> bool:
    """Whether the weights of all rows with an advantage are 0, since a method adds its whole advantage."""
    live = batch.response_mask & (batch.advantages != 0)[:, None]
    return weights.additive is not None and bool(live.any()) and not bool((weights.values * live).any())

"""Control experiments for any credit method.

A control takes the weights of the configured method, so that gate, clips, answer overwrite and histogram stay those
of the treatment. Its random numbers are keyed by seed, step and row, so no other random stream of the run changes.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.core.credit.base import (
    CreditContext,
    CreditControl,
    Refresh,
    TokenCredit,
    TokenWeights,
    rows_by_group,
    token_advantages,
    weigh,
)
from grail_lightning.core.functional.weighting import mean_one
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_reduce

_CANCELLED = 0.01  # A sum below this share of its absolute values has cancelled: its sign is noise.


class Shuffled(CreditControl):
    """Permutes each rollout's weights among its tokens outside the answer: same histogram, no information.

    An additive stage is permuted alike.
    """

    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The permuted weights."""
        free = _reasoning(weights, batch).cpu()
        source = torch.arange(free.shape[1]).repeat(len(free), 1)
        for k, row in enumerate(batch.row.tolist()):
            places = free[k].nonzero().flatten()
            source[k, places] = places[torch.randperm(len(places), generator=context.row_generator(row))]
        source = source.to(weights.values.device)
        return weights.changed(lambda tensor: tensor.gather(1, source))


@dataclass(eq=False)
class Random(CreditControl):
    """Draws weights from the clipped normal of GRAIL's map: the same mean, deviation and clips, without saliency.

    An additive stage is 0 there. Rows in which the method credits all tokens outside the answer alike stay as they are.
    If the method scales its rows to the mean 1, so does the control.

    Args:
        mean: Mean of the normal.
        std: Standard deviation of the normal.
        w_min: Lower clamp.
        w_max: Upper clamp.
    """

    mean: float = 1.0
    std: float = 0.5
    w_min: float = 0.5
    w_max: float = 5.0

    def __post_init__(self) -> None:
        check_options(self, mean="(-inf, inf)", std="[0, inf)", w_min=f"[0, {self.w_max}]")

    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The drawn weights."""
        free = _reasoning(weights, batch)
        treated = _varies(weights.values, free)
        if weights.additive is not None:
            treated = treated | _varies(weights.additive, free)
        values = weights.before_scale.clone()
        for k in treated.nonzero().flatten().tolist():
            places = free[k].nonzero().flatten()
            generator = context.row_generator(int(batch.row[k]))
            drawn = torch.randn(len(places), generator=generator, dtype=torch.float32)
            clamped = (self.mean + self.std * drawn).clamp(self.w_min, self.w_max)
            values[k, places] = clamped.to(values)
        return _replaced(weights, values, batch, free & treated[:, None])


class AnswerOnly(CreditControl):
    """Sets the weights outside the answer to 1: the method's answer overwrite remains, its scores have no effect.

    An additive stage is 0 there. If the method scales its rows to the mean 1, so does the control.
    """

    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The overwritten weights."""
        free = _reasoning(weights, batch)
        return _replaced(weights, weights.before_scale.masked_fill(free, 1), batch, free)


class SameMagnitude(CreditControl):
    r"""Scales all credit of a batch, so that its mean absolute advantage of a token is that of uniform credit.

    .. math:: A'_{it} = s\,A_{it}, \qquad s = \frac{\sum_{it} |A_i|}{\sum_{it} |A_{it}|}

    The sums run over the response tokens of all ranks, those of truncated rollouts included. A method that adds to
    advantages, or whose weights have a mean above 1, takes larger steps than `Uniform` at the same learning rate, which
    alone can look like a gain; here it does not. A batch without any advantage stays as it is.
    """

    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The scaled weights, and the additive stage scaled alike."""
        advantages = batch.advantages.double()
        credit = token_advantages(advantages, weights)
        sums = torch.stack([(advantages[:, None] * batch.response_mask).abs().sum(), credit.abs().sum()])
        uniform, total = all_reduce(sums, "sum").tolist()
        if uniform == 0 or total == 0:
            return weights
        return weights.changed(lambda tensor: tensor * (uniform / total))


class Balanced(CreditControl):
    r"""Scales right and wrong rollouts by a factor each, so that both have the total advantage of uniform credit.

    .. math:: A'_{it} = s_k\,A_{it}, \qquad s_k = \frac{\sum_{i \in k} \sum_t A_i}{\sum_{i \in k} \sum_t A_{it}}, \qquad
              k \in \{\text{right}, \text{wrong}\}

    The sums run over the tokens of a batch on all ranks, those of truncated rollouts included. A method that praises
    more than it blames trains better for that alone (`advantage.share`); what is left of its gain under this control
    comes from the tokens. A sum that is zero, of the other sign, or less than a hundredth of the sum of absolute values
    has no such factor: its rollouts stay as they are, and the figure `unbalanced` counts it.
    """

    reads_correct = True

    def __call__(self, weights: TokenWeights, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The scaled weights, and the additive stage scaled alike."""
        advantages = batch.advantages.double()
        uniform, credit = advantages[:, None] * batch.response_mask, token_advantages(advantages, weights)
        kinds = torch.stack([batch.correct, ~batch.correct]).double()
        sums = torch.stack([kinds @ table.sum(1) for table in (uniform, credit, credit.abs())])
        wanted, total, absolute = all_reduce(sums, "sum")
        possible = (wanted * total > 0) & (total.abs() > _CANCELLED * absolute)
        factors = torch.where(possible, wanted / torch.where(possible, total, 1), 1)
        factor = torch.where(batch.correct, factors[0], factors[1])[:, None]
        scaled = weights.changed(lambda tensor: tensor * factor.to(tensor))
        return replace(scaled, metrics={**weights.metrics, "unbalanced": float((~possible & (wanted != total)).sum())})


@dataclass(eq=False)
class RandomSubset(TokenCredit):
    """Trains on a random share of each rollout's tokens: what every method that selects tokens has to beat.

    Tokens of weight 0 still count in the loss's denominator, as with `HighEntropy`.

    Args:
        share: The probability with which a token is kept.

    Source: arXiv 2605.07660, where a fifth of the tokens, drawn at random, keeps most of DAPO's result.
    """

    runs_policy = False

    share: float = 0.2

    def __post_init__(self) -> None:
        check_options(self, share="(0, 1]")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on the tokens that are kept, and 0 on the others."""
        values = torch.zeros_like(batch.response_mask, dtype=batch.advantages.dtype)
        for mask, row_values, row in zip(batch.response_mask, values, batch.row.tolist(), strict=True):
            drawn = torch.rand(int(mask.sum()), generator=context.row_generator(row), dtype=torch.float32)
            row_values[mask] = (drawn < self.share).to(row_values)
        return TokenWeights(values=values)


class PermutedRewards(TokenCredit):
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
        self.inner = inner
        self.mirrored = mirrored

    @property
    def refresh(self) -> Refresh:
        """That of the inner method. Its saliency is not fused: it is computed with the permuted rewards."""
        return self.inner.refresh

    @property
    def replaces_advantage(self) -> bool:
        """That of the inner method."""
        return self.inner.replaces_advantage

    @property
    def runs_policy(self) -> bool:
        """That of the inner method."""
        return self.inner.runs_policy

    @property
    def reads_correct(self) -> bool:
        """That of the inner method."""
        return self.inner.reads_correct

    @property
    def reads_reference(self) -> bool:
        """That of the inner method."""
        return self.inner.reads_reference

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """The remark of the inner method."""
        return self.inner.check_prompts(sets)

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner method."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the inner method."""
        self.inner.load_state_dict(state)

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
        if self.replaces_advantage:
            rank_zero_warn(
                f"`PermutedRewards` permutes the whole advantage of `{type(self.inner).__name__}`, which is made of "
                "rewards, so that right rollouts are blamed: this is no control of its credit by token."
            )
        return weights


def _reasoning(weights: TokenWeights, batch: RolloutBatch) -> Tensor:
    """``[B, T]`` bool: valid tokens before the answer that the method located."""
    answer = weights.answer or batch.answer
    return batch.response_mask & ~answer.whole & ~answer.after


def _replaced(weights: TokenWeights, values: Tensor, batch: RolloutBatch, free: Tensor) -> TokenWeights:
    """Weights with other values, scaled as the method's are, and no additive stage on the tokens that are free."""
    mask, additive = batch.response_mask, weights.additive
    if weights.unscaled is not None:
        values = mean_one(values, mask)
    return replace(weights, values=values, additive=None if additive is None else additive.masked_fill(free, 0))


def _varies(values: Tensor, mask: Tensor) -> Tensor:
    """``[B]`` bool: rows whose weights differ within the mask."""
    high = values.masked_fill(~mask, -torch.inf).amax(1)
    low = values.masked_fill(~mask, torch.inf).amin(1)
    return high > low

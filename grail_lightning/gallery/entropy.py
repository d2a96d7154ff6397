"""Credit from the policy's own distribution: entropy, probability, certainty, distance to the reference.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.core.credit.base import (
    CreditContext,
    Mean,
    TokenCredit,
    TokenWeights,
    one_elsewhere,
    rows_by_group,
)
from grail_lightning.core.credit.measure import entropies, logprobs, measure_logits, measure_rows
from grail_lightning.core.credit.service import FrozenReference
from grail_lightning.core.functional.certainty import group_zscore, hellinger, quantile_of_all, self_certainty
from grail_lightning.core.functional.tokens import in_chunks
from grail_lightning.core.functional.weighting import segment_weights
from grail_lightning.core.policy.layout import TokenLayout
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import all_gather_rows, all_reduce


@dataclass(eq=False)
class HighEntropy(TokenCredit):
    r"""Trains only on the tokens of highest entropy (the 80/20 rule).

    .. math:: w_t = [H_t \ge q_{1-\rho}(H)],\quad q \text{ over all tokens of the batch on all ranks}

    The threshold includes every rollout, also those without an advantage. Tokens of weight 0 still count in the loss's
    denominator.

    Args:
        share: ρ, the share of tokens that is kept.

    Source: arXiv 2506.01939.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        check_options(self, share="(0, 1]")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on the tokens of highest entropy, and 0 on the others."""
        mask = batch.response_mask
        entropy = entropies(policy, batch, context, torch.arange(len(batch)))
        threshold = quantile_of_all(all_gather_rows(entropy[mask]), 1 - self.share)
        return TokenWeights(
            values=((entropy.double() >= threshold) & mask).to(entropy.dtype),
            scores=entropy,
            metrics={"entropy_threshold": threshold.item()},
        )


@dataclass(eq=False)
class AdvantageReweighting(TokenCredit):
    r"""Weights that grow with the token's probability, so that unlikely tokens do not dominate the gradient.

    .. math:: w_t = \alpha\, \pi_{old}(y_t \mid x, y_{<t}) + (1 - \alpha)

    Rows without an advantage have weight 1 and need no forward pass.

    Args:
        alpha: The influence of the probability on the weight.

    Source: arXiv 2505.12929.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_options(self, alpha="[0, 1]")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from log-probabilities before the update."""
        weighed = batch.advantages != 0
        scored = batch.response_mask & weighed[:, None]
        old = logprobs(policy, batch, context, weighed.nonzero().flatten())
        probability = old.exp().masked_fill(~scored, 0)
        values = one_elsewhere(self.alpha * probability + (1 - self.alpha), scored, batch.response_mask)
        return TokenWeights(values=values, scores=probability)


@dataclass(eq=False)
class LESS(TokenCredit):
    r"""Weights by whether a segment of low entropy occurs in correct rollouts, in wrong ones, or in both.

    .. math:: w_t = 1 \text{ (high entropy)},\quad 1/n \text{ (low)},\quad
              \max(w_t, k/n) \text{ (in } k \text{ of } n \text{ rollouts of one kind)},\quad 0 \text{ (in both kinds)}

    See `grail_lightning.core.functional.weighting.segment_weights`. Groups without an advantage have weight 1.

    Args:
        share: The share of each rollout's tokens that counts as low entropy.
        min_length: Least number of tokens of a segment.

    Source: arXiv 2512.00908 and its published code.
    """

    reads_correct = True

    share: float = 0.8
    min_length: int = 5

    def __post_init__(self) -> None:
        check_options(self, share="[0, 1]", min_length="[1, inf)")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from the runs of low entropy of each group."""
        mask = batch.response_mask
        live = torch.isin(batch.group, batch.group[batch.advantages != 0])
        entropy = entropies(policy, batch, context, live.nonzero().flatten())
        values = mask.to(entropy.dtype)
        for rows in rows_by_group(batch):
            if not live[rows[0]]:
                continue
            texts = batch.response_ids[rows], entropy[rows], mask[rows], batch.correct[rows]
            values[rows] = segment_weights(*texts, share=self.share, min_length=self.min_length)
        return TokenWeights(values=values, scores=entropy)


@dataclass(eq=False)
class UCAS(TokenCredit):
    r"""Advantages that fall with the policy's certainty about a rollout and about each of its tokens.

    ``C`` is the rollout's summed self-certainty, z-scored in its group; ``u`` are the sampled tokens' logits, min-max
    scaled over the batch of all ranks:

    .. math::
        A' = A e^{-0.25\,C} \text{ if } A > 0 \text{ else } A e^{0.35\,C}, \qquad
        A_t = A' - 0.05\,u_t, \text{ at least } 0 \text{ where } A' > 0

    The second stage is additive, so rollouts without an advantage have a gradient, too, and every rollout needs a
    forward pass. Exponents are clipped to ±20, which only unstandardised certainties can reach.

    Args:
        reward_scale: 0.25 in the equation, the decrease of a positive advantage with certainty.
        penalty_scale: 0.35 in the equation, the growth of a negative advantage with certainty.
        token_penalty: 0.05 in the equation, the amount subtracted at the token of the highest logit.
        standardise: Whether ``C`` is divided by the group's standard deviation. The published code only centres it if
            rewards are not scaled (`advantage.scale: none`); its sums then differ by tens of nats.

    Source: arXiv 2510.10649 and its published code.
    """

    reward_scale: float = 0.25
    penalty_scale: float = 0.35
    token_penalty: float = 0.05
    standardise: bool = True

    def __post_init__(self) -> None:
        check_options(self, **dict.fromkeys(("reward_scale", "penalty_scale", "token_penalty"), "[0, inf)"))

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of each rollout, and the penalties of its tokens as an additive stage."""
        mask, advantages = batch.response_mask, batch.advantages
        certainty, logit = measure_logits(policy, batch, context, torch.arange(len(batch)), self_certainty)
        surety = group_zscore(certainty.double().sum(1), batch.group, standardise=self.standardise)
        exponent = torch.where(advantages > 0, -self.reward_scale * surety, self.penalty_scale * surety)
        values = (exponent.clamp(-20, 20).exp()[:, None] * mask).to(certainty.dtype)
        shaped = advantages[:, None] * values
        lowered = shaped - self.token_penalty * _min_max(logit, mask)
        # The finished sum is clamped, so that shaped + additive is exactly 0 at the floor.
        additive = torch.where(shaped > 0, lowered.clamp(min=0), lowered) - shaped
        return TokenWeights(
            values=values,
            scores=certainty,
            additive=additive.masked_fill(~mask, 0),
            metrics={"self_certainty": Mean.over(certainty, mask)},
        )


def _min_max(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` scaled to [0, 1] over the masked values of all ranks; 0 if all are equal."""
    low = values.masked_fill(~mask, torch.inf).amin()
    high = values.masked_fill(~mask, -torch.inf).amax()
    highest, lowest = all_reduce(torch.stack([high, -low]), "max") * torch.tensor([1, -1], device=values.device)
    width = highest - lowest
    return torch.where(mask & (width > 0), (values - lowest) / width, 0.0)


@dataclass(eq=False)
class DGPO(TokenCredit):
    r"""Weights that grow where the policy has moved away from the reference and has a high entropy.

    .. math:: w_t = T\, \mathrm{softmax}_t(s / \tau), \qquad s_t = d_t\, h_t^{\kappa}, \qquad
              d_t = 1 - \sum_v \sqrt{\pi(v)\, \pi_{ref}(v)}, \qquad h_t = H_t / \log |V|

    over the ``T`` tokens of a rollout, whose weights have the mean 1. At the first step the policy is the reference and
    all weights are 1. Rows without an advantage have weight 1 and need no forward pass. The reference is the policy
    before training (without its adapters, for LoRA).

    Args:
        entropy_power: κ, the power of the normalised entropy; 0 leaves it out.
        temperature: τ of the softmax.

    Source: arXiv 2605.03327. No published code was found; the logits are divided by the sampling temperature, which is
    our choice.
    """

    services = (FrozenReference,)

    entropy_power: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, entropy_power="[0, inf)", temperature="(0, inf)")

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from policy and reference."""
        mask, weighed = batch.response_mask, batch.advantages != 0
        reference = context.service(FrozenReference)

        def figures(states: Tensor, other_states: Tensor) -> tuple[Tensor, Tensor]:
            logits = policy.head(states)
            with reference.running(policy) as frozen:
                return hellinger(logits, frozen.head(other_states), context.temperature)

        def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
            with reference.running(policy) as frozen:
                others = layout.at_predictors(frozen.decode(layout))
            states = layout.at_predictors(policy.decode(layout))
            return tuple(layout.to_rows(f) for f in in_chunks(figures, states, others, policy.chunk_tokens))

        distance, entropy = measure_rows(policy, batch, context, weighed.nonzero().flatten(), measure, 2)
        vocabulary = policy.model.config.get_text_config().vocab_size
        scores = distance * (entropy / math.log(vocabulary)).clamp(min=0).pow(self.entropy_power)
        share = torch.softmax((scores / self.temperature).masked_fill(~mask, -torch.inf), 1)
        scored = mask & weighed[:, None]
        return TokenWeights(
            values=one_elsewhere(share * mask.sum(1, keepdim=True), scored, mask),
            scores=scores,
            metrics={"reference_distance": Mean.over(distance, scored)},
        )

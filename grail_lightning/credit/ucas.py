"""UCAS: uncertainty-aware advantage shaping (arXiv 2510.10649).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.credit.forward import measure_logits
from grail_lightning.functional import masked_sum
from grail_lightning.functional.certainty import group_zscore, self_certainty
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_reduce

_LARGEST_EXPONENT = 20.0


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
            rewards are not scaled (`objective.scale_rewards: none`); its sums then differ by tens of nats.

    Raises:
        ValueError: If a scale is negative.

    Source: arXiv 2510.10649 and its published code.
    """

    def __init__(
        self,
        reward_scale: float = 0.25,
        penalty_scale: float = 0.35,
        token_penalty: float = 0.05,
        standardise: bool = True,
    ) -> None:
        named = {"reward_scale": reward_scale, "penalty_scale": penalty_scale, "token_penalty": token_penalty}
        for name, value in named.items():
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, but got {value}. Use 0 to switch it off.")
        self.reward_scale, self.penalty_scale, self.token_penalty = reward_scale, penalty_scale, token_penalty
        self.standardise = standardise

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights and additive stage of a batch whose advantages are set."""
        mask, advantages = batch.response_mask, batch.advantages
        certainty, logit = measure_logits(policy, batch, context, torch.arange(len(batch)), self_certainty)
        surety = group_zscore(certainty.double().sum(1), batch.group, standardise=self.standardise)
        exponent = torch.where(advantages > 0, -self.reward_scale * surety, self.penalty_scale * surety)
        factor = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()
        values = (factor[:, None] * mask).to(certainty.dtype)
        shaped = advantages[:, None] * values
        lowered = shaped - self.token_penalty * _min_max(logit, mask)
        # The finished sum is clamped, so that shaped + additive is exactly 0 at the floor.
        additive = torch.where(shaped > 0, lowered.clamp(min=0), lowered) - shaped
        return TokenWeights(
            values=values,
            scores=certainty,
            additive=additive.masked_fill(~mask, 0),
            fallback=torch.zeros_like(advantages, dtype=torch.bool),
            metrics={"self_certainty": Mean(masked_sum(certainty, mask).item(), mask.sum().item())},
        )


def _min_max(values: Tensor, mask: Tensor) -> Tensor:
    """``[B, T]`` scaled to [0, 1] over the masked values of all ranks; 0 if all are equal."""
    low = values.masked_fill(~mask, torch.inf).amin()
    high = values.masked_fill(~mask, -torch.inf).amax()
    highest, lowest = all_reduce(torch.stack([high, -low]), "max") * torch.tensor([1, -1], device=values.device)
    width = highest - lowest
    return torch.where(mask & (width > 0), (values - lowest) / width, 0.0)

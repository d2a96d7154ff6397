"""Credit from the policy's own distribution: entropy (80/20) and probability (advantage reweighting).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, TokenCredit, TokenWeights
from grail_lightning.credit.forward import entropies, logprobs
from grail_lightning.functional.certainty import quantile_of_all
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_gather_rows


class HighEntropy(TokenCredit):
    r"""Trains only on the tokens of highest entropy (the 80/20 rule).

    .. math:: w_t = [H_t \ge q_{1-\rho}(H)],\quad q \text{ over all tokens of the batch on all ranks}

    The threshold includes every rollout, also those without an advantage. Tokens of weight 0 still count in the loss's
    denominator.

    Args:
        share: ρ, the share of tokens that is kept.

    Raises:
        ValueError: If `share` is not in (0, 1].

    Source: arXiv 2506.01939.
    """

    def __init__(self, share: float = 0.2) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"`share` must lie in (0, 1], but got {share}. Use 0.2 to keep a fifth of the tokens.")
        self.share = share

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weight 1 on the tokens of highest entropy of the batch, and 0 on the others."""
        mask = batch.response_mask
        found = entropies(policy, batch, context, torch.arange(len(batch)))
        threshold = quantile_of_all(all_gather_rows(found[mask]), 1 - self.share)
        kept = (found.double() >= threshold) & mask
        metrics = {"entropy_threshold": threshold.item()}
        none = torch.zeros_like(batch.advantages, dtype=torch.bool)
        return TokenWeights(values=kept.to(found.dtype), scores=found, fallback=none, metrics=metrics)


class AdvantageReweighting(TokenCredit):
    r"""Weights that grow with the token's probability, so that unlikely tokens do not dominate the gradient.

    .. math:: w_t = \alpha\, \pi_{old}(y_t \mid x, y_{<t}) + (1 - \alpha)

    Rows without an advantage have weight 1 and need no forward pass.

    Args:
        alpha: The influence of the probability on the weight.

    Raises:
        ValueError: If `alpha` is not in [0, 1].

    Source: arXiv 2505.12929.
    """

    def __init__(self, alpha: float = 0.2) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"`alpha` must lie in [0, 1], but got {alpha}. Use 0 for the same weight everywhere.")
        self.alpha = alpha

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages are set."""
        mask, weighed = batch.response_mask, batch.advantages != 0
        old = logprobs(policy, batch, context, weighed.nonzero().flatten())
        scored = mask & weighed[:, None]
        probability = old.exp().masked_fill(~scored, 0)
        values = torch.where(scored, self.alpha * probability + (1 - self.alpha), mask.to(old.dtype))
        return TokenWeights(values=values, scores=probability, fallback=torch.zeros_like(weighed))

"""LESS: low-entropy segments that occur in several rollouts of a group (arXiv 2512.00908).

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, Mean, TokenCredit, TokenWeights
from grail_lightning.credit.forward import entropies
from grail_lightning.functional.weighting import segment_weights
from grail_lightning.policy import Policy


class LESS(TokenCredit):
    r"""Weights by whether a segment of low entropy occurs in correct rollouts, in wrong ones, or in both.

    .. math:: w_t = 1 \text{ (high entropy)},\quad 1/n \text{ (low)},\quad
              \max(w_t, k/n) \text{ (in } k \text{ of } n \text{ rollouts of one kind)},\quad 0 \text{ (in both kinds)}

    See `grail_lightning.functional.weighting.segment_weights`. Groups without an advantage need no forward pass and
    have weight 1.

    Args:
        share: The share of each rollout's tokens that counts as low entropy.
        min_length: Least number of tokens of a segment.

    Raises:
        ValueError: If `share` is not in [0, 1] or `min_length` is not positive.

    Source: arXiv 2512.00908 and its published code.
    """

    def __init__(self, share: float = 0.8, min_length: int = 5) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"`share` must lie in [0, 1], but got {share}.")
        if min_length < 1:
            raise ValueError(f"`min_length` must be at least 1 token, but got {min_length}.")
        self.share, self.min_length = share, min_length

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of a batch whose advantages and correctness are set."""
        live = torch.isin(batch.group, batch.group[batch.advantages != 0])
        found = entropies(policy, batch, context, live.nonzero().flatten())
        values = batch.response_mask.to(found.dtype)
        for group in sorted(set(batch.group[live].tolist())):
            rows = (batch.group == group).nonzero().flatten()
            values[rows] = segment_weights(
                batch.response_ids[rows],
                found[rows],
                batch.response_mask[rows],
                batch.correct[rows],
                share=self.share,
                min_length=self.min_length,
            )
        shared = ((values == 0) & batch.response_mask).sum().item()
        return TokenWeights(
            values=values,
            scores=found,
            fallback=torch.zeros_like(live),
            metrics={"shared_tokens": Mean(shared, batch.response_mask.sum().item())},
        )

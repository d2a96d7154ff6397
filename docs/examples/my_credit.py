"""A credit method: unlikely tokens get more of the credit."""

from __future__ import annotations

import torch

from grail_lightning import Policy, RolloutBatch
from grail_lightning.credit import CreditContext, TokenCredit, TokenWeights, logprobs


class Surprise(TokenCredit):
    r"""Weights that grow with the surprisal of a token.

    .. math:: w_t = \min(1 - \log\pi(y_t),\ top)

    Args:
        top: The largest weight.
    """

    def __init__(self, top: float = 2.0) -> None:
        if top < 1:
            raise ValueError(f"`top` must be at least 1, but got {top}. Use 1 for the same weight everywhere.")
        self.top = top

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights ``[B, T]`` of a batch whose rewards, advantages and answers are set."""
        rows = torch.arange(len(batch))  # All of them; in parts of at most `context.token_budget` tokens.
        surprisal = -logprobs(policy, batch, context, rows)
        values = (1 + surprisal).clamp(max=self.top) * batch.response_mask
        return TokenWeights(values=values, scores=surprisal)

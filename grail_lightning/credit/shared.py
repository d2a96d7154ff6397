"""Saliency from the forward passes that an update makes anyway.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grail_lightning.clock import synchronised_clock
from grail_lightning.credit.base import CreditContext, Explained, TokenCredit, explained_by, weigh
from grail_lightning.credit.saliency import forward_with_saliency, saliency_of_rows
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.policy import Policy
from grail_lightning.policy.prefix import drops_out, graphs_last
from grail_lightning.rollout import RolloutBatch, TokenWeights


def share_forward(
    credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext, trained: Tensor
) -> SharedSaliency | None:
    """What lets the update compute the weights of `credit` beside its first forward pass.

    Args:
        credit: The configured method.
        policy: Whose update.
        batch: ``B`` rows with advantages and answer masks.
        context: Of the credit.
        trained: ``[B]`` bool, the rows that get a forward pass in the update if their advantage is not zero.

    Returns:
        None where sharing would be wrong or no gain: the method needs no saliency or asks for its own, dropout is on
        (saliency is taken without), blocks are checkpointed (each backward pass would repeat the forward pass), or the
        weights are sharded (FSDP frees them after a backward pass).
    """
    if (explained := explained_by(credit, policy, batch)) is None:
        return None
    if drops_out(policy) or not graphs_last(policy):
        return None
    return SharedSaliency(credit, policy, batch, context, explained, trained)


class SharedSaliency:
    """The token weights of a batch, row by row as the update comes by.

    Args:
        credit: A method whose weights of a row depend on that row alone.
        policy: As it sampled.
        batch: ``B`` rows.
        context: Of the credit.
        explained: What the method asks for.
        trained: ``[B]`` bool; rows outside are computed at once, the others are the update's.

    Attributes:
        rows: ``[B]`` bool on the CPU, the rows whose first forward pass in the update must be `forward`.
        seconds: Spent on saliency and weights inside the update.
    """

    def __init__(
        self,
        credit: TokenCredit,
        policy: Policy,
        batch: RolloutBatch,
        context: CreditContext,
        explained: Explained,
        trained: Tensor,
    ) -> None:
        self.credit, self.batch, self.context, self.explained = credit, batch, context, explained
        self.rows = (explained.rows & trained).cpu()
        self.seconds = 0.0
        untrained = replace(explained, rows=explained.rows & ~trained)
        scores = saliency_of_rows(
            policy, batch, untrained, token_budget=context.token_budget, temperature=context.temperature
        )
        self._scores = scores.to(torch.promote_types(policy.model.dtype, torch.float32))

    def forward(
        self, policy: Policy, piece: RolloutBatch, part: Tensor, *, frozen: bool, behind: Any = None
    ) -> tuple[TokenStats, TokenWeights]:
        """Log-probabilities and entropy ``[b, t]``, and token weights, of the rows `part` ``[b]``.

        Args:
            policy: As it sampled.
            piece: The rows, trimmed.
            part: Which of the batch's rows they are.
            frozen: Without a gradient of the log-probabilities, in evaluation mode.
            behind: As for `Policy.forward`.
        """
        part, columns = part.to(self._scores.device), piece.response_mask.shape[1]
        explained = replace(self.explained, objective=self.explained.objective[part, :columns])
        stats, saliency = forward_with_saliency(
            policy, piece, explained, temperature=self.context.temperature, frozen=frozen, behind=behind
        )
        start = synchronised_clock(policy.device)
        found = saliency()
        self._scores[part, :columns] = found
        weights = self._weigh(policy, piece, found)
        self.seconds += synchronised_clock(policy.device) - start
        return stats, weights

    def repeat(self, source: Tensor, rows: Tensor) -> None:
        """Take the scores of the rows `source` ``[n]`` for others that say the same, `rows` ``[n]``."""
        source, rows = source.to(self._scores.device), rows.to(self._scores.device)
        self._scores[rows] = self._scores[source]

    def weights(self, policy: Policy) -> TokenWeights:
        """The weights of the whole batch, as far as its scores are there: those of `rows` come with `forward`."""
        return self._weigh(policy, self.batch, self._scores)

    def _weigh(self, policy: Policy, batch: RolloutBatch, scores: Tensor) -> TokenWeights:
        return weigh(self.credit, policy, batch, replace(self.context, scores=scores))

"""Controls of the methods of prefix trees in benchmarks/credit_quality.py.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import CreditContext, TokenCredit
from grail_lightning.credit.base import TokenWeights
from grail_lightning.policy import Policy
from grail_lightning.policy.aligned import response_nodes


class PermutedRewards(TokenCredit):
    """A method that sees the rewards of each group in a random order, with the advantages as they are.

    The tree and the histogram of rewards stay the same, without information about which row earned which.

    Args:
        inner: The method, which may read rewards and correctness.
    """

    def __init__(self, inner: TokenCredit) -> None:
        self.inner = inner

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The inner method's weights of the batch with permuted rewards."""
        order = torch.arange(len(batch))
        for group in batch.group.unique().tolist():
            rows = (batch.group == group).nonzero().flatten()
            generator = context.row_generator(int(batch.row[rows[0]]))
            order[rows] = rows[torch.randperm(len(rows), generator=generator)]
        permuted = batch.replace(rewards=batch.rewards[order], correct=batch.correct[order])
        return self.inner(policy, permuted, context)


def leaves_tree(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: 1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = response_nodes(batch.response_ids, batch.response_mask, batch.group)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()

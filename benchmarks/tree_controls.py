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

    The tree and the histogram of rewards stay the same, without information about which row earned which. Where few
    rows are right, most rare branches then hold wrong rows alone, so rarity still shows. With `mirrored`, each group's
    rewards also change sides at random (right for wrong), and the expected AUROC of any change of value is 0.5.

    Args:
        inner: The method, which may read rewards.
        mirrored: Whether rewards also change sides in a random half of the groups.
    """

    def __init__(self, inner: TokenCredit, *, mirrored: bool = False) -> None:
        self.inner, self.mirrored = inner, mirrored

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """The inner method's weights of the batch with permuted rewards."""
        order, rewards = torch.arange(len(batch)), batch.rewards.clone()
        for group in batch.group.unique().tolist():
            rows = (batch.group == group).nonzero().flatten()
            generator = context.row_generator(int(batch.row[rows[0]]))
            order[rows] = rows[torch.randperm(len(rows), generator=generator)]
            if self.mirrored and torch.rand(1, generator=generator) < 0.5:
                rewards[rows] = rewards[rows].max() + rewards[rows].min() - rewards[rows]
        return self.inner(policy, batch.replace(rewards=rewards[order]), context)


def leaves_tree(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: 1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = response_nodes(batch.response_ids, batch.response_mask, batch.group)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()

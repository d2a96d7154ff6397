"""A control of the methods of prefix trees in benchmarks/credit_quality.py.

This module belongs to credit_quality.py and is not run by itself.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit import CreditContext
from grail_lightning.policy import Policy
from grail_lightning.policy.aligned import response_nodes


def leaves_tree(policy: Policy, batch: RolloutBatch, context: CreditContext) -> Tensor:
    """``[B, T]``: 1 at the first token of each row after which no other row of its group is at the same place."""
    nodes = response_nodes(batch.response_ids, batch.response_mask, batch.group)
    number = torch.bincount(nodes[nodes >= 0])[nodes.clamp(min=0)].masked_fill(nodes < 0, 0)
    alone = number == 1
    return (alone & (alone.cumsum(1) == 1)).float()

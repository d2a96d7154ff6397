"""Advantages of rollouts relative to their group, and advantages of tokens, which include the token weights.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit.base import TokenWeights
from grail_lightning.functional.advantages import Scaling, group_advantages
from grail_lightning.runtime.collectives import all_gather_rows


def with_advantages(batch: GradedBatch, group_size: int, scale: Scaling) -> RolloutBatch:
    """The batch with its rollouts' advantages ``[B]``: rewards relative to those of the group.

    `group_size` is the number of rows of each prompt, `scale` is `Objective.scale_rewards`; statistics of the batch are
    those of all ranks.
    """
    rewards = batch.rewards
    std = all_gather_rows(rewards).std() if scale == "batch" else None
    means = all_gather_rows(rewards.double().reshape(-1, group_size).mean(1)) if scale == "bnpo" else None
    return batch.with_advantages(group_advantages(rewards, group_size, scale, std, means))


def token_advantages(advantages: Tensor, weights: TokenWeights) -> Tensor:
    """``A_it = A_i · w_it``, plus the additive stage if there is one, ``[B, T]``."""
    product = advantages[:, None] * weights.values
    return product if weights.additive is None else product + weights.additive


def effective_weights(advantages: Tensor, weights: TokenWeights) -> Tensor:
    """``A_it / A_i``, ``[B, T]``: what to show of a method with an additive stage; ``w_it`` where ``A_i`` is 0."""
    if weights.additive is None:
        return weights.values
    return torch.where(
        advantages[:, None] == 0, weights.values, token_advantages(advantages, weights) / advantages[:, None]
    )

"""The objective: which rows count, how they are cut into optimiser steps, and the loss of a micro-batch.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.functional import aggregate, clipped_surrogate, kl_estimate, masked_sum
from grail_lightning.functional.policy_gradient import Aggregation, Estimator, Level, Scaling, importance_ratio
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.rollout import RolloutBatch, micro_batches


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one batch of rollouts is turned into.

    Attributes:
        group_size: Rollouts of each prompt.
        updates_per_batch: Passes over the rollouts.
        mini_batches: Optimiser steps of each pass; groups are not split.
        aggregation: Of token losses: grpo, dr_grpo or dapo.
        scale_rewards: Divide advantages by nothing (none), the std of the group, or of the batch over all ranks.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio.
        ratio_cap: Upper bound on the unclipped ratio (two-sided clip); null is off.
        level: Ratio of each token, or of the sequence (GSPO-token).
        kl_coefficient: Of the KL to the frozen reference; 0 loads no reference.
        kl_estimator: k1, k2 or k3.
        kl_corrected: Weight the estimate with the importance ratio, which makes its gradient right.
        mask_truncated: Leave rollouts that hit the length limit out of the loss.
        token_budget: Most padded tokens of a micro-batch.
        max_grad_norm: Gradients are scaled down to this norm; null is off.
    """

    group_size: int = 8
    updates_per_batch: int = 1
    mini_batches: int = 1
    aggregation: Aggregation = "dr_grpo"
    scale_rewards: Scaling = "none"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float | None = None
    level: Level = "token"
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_corrected: bool = True
    mask_truncated: bool = True
    token_budget: int = 16384
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name, least in (("group_size", 2), ("updates_per_batch", 1), ("mini_batches", 1), ("token_budget", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`objective.{name}` must be at least {least}, but got {getattr(self, name)}.")
        if self.kl_coefficient < 0:
            raise ValueError(f"`objective.kl_coefficient` must not be negative, but got {self.kl_coefficient}.")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(
                f"`objective.max_grad_norm` must be positive, but got {self.max_grad_norm}. Use null to switch it off."
            )
        one = torch.ones(1, 1)  # Clip ranges and cap are checked where they are used; ask there before anything runs.
        clipped_surrogate(one, one, one, clip_low=self.clip_low, clip_high=self.clip_high, ratio_cap=self.ratio_cap)


@dataclass(frozen=True, kw_only=True)
class LossCounts:
    """Denominators of one optimiser step, over all micro-batches and ranks."""

    num_rollouts: int
    num_tokens: int


def loss_mask(batch: RolloutBatch, objective: Objective) -> Tensor:
    """``[B, T]`` bool: the tokens of the loss, in numerator and denominator alike."""
    kept = batch.finished | (not objective.mask_truncated)
    return batch.response_mask & kept[:, None]


def live_rows(batch: RolloutBatch, mask: Tensor, objective: Objective, additive: Tensor | None) -> Tensor:
    """``[B]`` bool: rows that can contribute a gradient. The others need no forward and no backward pass."""
    assert batch.advantages is not None
    everything = bool(objective.kl_coefficient) or additive is not None
    return mask.any(1) & ((batch.advantages != 0) | everything)


def split_groups(batch: RolloutBatch, objective: Objective, generator: torch.Generator) -> list[Tensor]:
    """The rows of each mini-batch of one pass: whole groups, in random order if there is more than one mini-batch.

    A batch of fewer groups than mini-batches (the last, incomplete one) gives empty mini-batches at the end.
    """
    group = batch.group.cpu()
    groups = torch.unique(group)
    if objective.mini_batches > 1:
        groups = groups[torch.randperm(len(groups), generator=generator)]
    # `tensor_split` takes any number; `chunk` may return fewer.
    return [torch.isin(group, part).nonzero().flatten() for part in torch.tensor_split(groups, objective.mini_batches)]


def cut(batch: RolloutBatch, rows: Tensor, objective: Objective) -> list[Tensor]:
    """Rows cut into micro-batches within the token budget, by their length."""
    return micro_batches(batch.lengths, objective.token_budget, rows)


def token_advantages(advantages: Tensor, weights: Tensor, additive: Tensor | None) -> Tensor:
    """``A_it = A_i · w_it`` (+ what an additive stage adds), ``[B, T]``."""
    product = advantages[:, None] * weights
    return product if additive is None else product + additive


def micro_batch_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    counts: LossCounts,
    max_response_length: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the optimiser step's loss, and sums to report.

    Args:
        stats: Log-probabilities ``[B, T]`` with gradient, and entropy.
        batch: The rows; `old_logprobs` None means that the policy has not moved since it sampled.
        advantages: ``[B, T]``, weights included.
        mask: ``[B, T]`` bool, tokens of the loss.
        objective: What to compute.
        counts: Denominators of the whole optimiser step.
        max_response_length: The limit in tokens.

    Returns:
        A scalar, and detached sums over the tokens of the loss.
    """
    logprobs = stats.logprobs
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    losses = clipped_surrogate(
        logprobs,
        old,
        advantages,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        ratio_cap=objective.ratio_cap,
        mask=mask,
        level=objective.level,
    )
    ratio = importance_ratio(logprobs, old, mask, objective.level)
    sums = dict(_sums(stats, ratio.detach(), advantages, mask, objective))
    if batch.ref_logprobs is not None:
        kl = kl_estimate(
            logprobs, batch.ref_logprobs, objective.kl_estimator, ratio=ratio if objective.kl_corrected else None
        )
        losses = losses + objective.kl_coefficient * kl
        plain = kl_estimate(logprobs.detach(), batch.ref_logprobs, objective.kl_estimator)
        sums["kl"] = masked_sum(plain, mask)
    loss = aggregate(
        losses,
        mask,
        objective.aggregation,
        num_rollouts=counts.num_rollouts,
        num_tokens=counts.num_tokens,
        max_response_length=max_response_length,
    )
    sums["loss"] = loss.detach()
    return loss, sums


def _sums(
    stats: TokenStats, ratio: Tensor, advantages: Tensor, mask: Tensor, objective: Objective
) -> Iterator[tuple[str, Tensor]]:
    low = (ratio < 1 - objective.clip_low) & (advantages < 0) & mask
    high = (ratio > 1 + objective.clip_high) & (advantages > 0) & mask
    yield "tokens", mask.sum()
    yield "clip_ratio/low_mean", low.sum()
    yield "clip_ratio/high_mean", high.sum()
    yield "clip_ratio/region_mean", (low | high).sum()
    if stats.entropy is not None:
        yield "entropy", masked_sum(stats.entropy, mask)

"""The objective: which rows count, how they are cut into optimiser steps, and the loss of a micro-batch.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.functional import aggregate, clipped_surrogate, group_advantages, kl_estimate, masked_sum
from grail_lightning.functional.policy_gradient import (
    Aggregation,
    Estimator,
    Level,
    Scaling,
    Surrogate,
    importance_ratio,
    sampler_correction,
)
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.ranks import all_rows
from grail_lightning.rollout import RolloutBatch, micro_batches

SAMPLER_GAP = "sampling/sampling_logp_difference/mean"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one batch of rollouts is turned into.

    Attributes:
        group_size: Rollouts of each prompt.
        refill_rounds: Most further samplings in place of groups that are all right or all wrong (dynamic sampling).
        updates_per_batch: Passes over the rollouts.
        mini_batches: Optimiser steps of each pass; groups are not split.
        aggregation: Of token losses: grpo, dr_grpo or dapo.
        scale_rewards: Divide advantages by nothing (none), the std of the group, or of the batch over all ranks; bnpo
            divides by the density of a Beta distribution that is fitted to the mean rewards of all groups.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio; .inf is off.
        ratio_cap: Upper bound on the unclipped ratio (two-sided or dual clip); null is off.
        level: Ratio of each token, or of the sequence (GSPO-token).
        surrogate: clip takes clipped tokens out of the gradient; cispo keeps them, with the clipped ratio as a weight.
        entropy_coefficient: Of an entropy bonus in nats a token; needs forward and backward of every row.
        sampler_cap: Weights tokens by how likely the trainer finds them beside the sampler, up to this; null is off.
        kl_coefficient: Of the KL to the frozen reference; 0 loads no reference.
        kl_estimator: k1, k2 or k3.
        kl_corrected: Weight the estimate with the importance ratio, which makes its gradient right; k1 alone has none.
        mask_truncated: Leave rollouts that hit the length limit out of the loss.
        token_budget: Most padded tokens of a micro-batch.
        share_prompts: Run a prompt once for all of its responses in the update, where that saves enough tokens.
        max_grad_norm: Gradients are scaled down to this norm; null is off.
    """

    group_size: int = 8
    refill_rounds: int = 0
    updates_per_batch: int = 1
    mini_batches: int = 1
    aggregation: Aggregation = "dr_grpo"
    scale_rewards: Scaling = "none"
    clip_low: float = 0.2
    clip_high: float = 0.28
    ratio_cap: float | None = None
    level: Level = "token"
    surrogate: Surrogate = "clip"
    entropy_coefficient: float = 0.0
    sampler_cap: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_corrected: bool = True
    mask_truncated: bool = True
    token_budget: int = 16384
    share_prompts: bool = True
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name, least in (
            ("group_size", 2),
            ("refill_rounds", 0),
            ("updates_per_batch", 1),
            ("mini_batches", 1),
            ("token_budget", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"`objective.{name}` must be at least {least}, but got {getattr(self, name)}.")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`objective.{name}` must be finite and ≥ 0, but got {getattr(self, name)}.")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ValueError(
                f"`objective.max_grad_norm` must be finite and positive, but got {self.max_grad_norm}. "
                "Use null to switch it off."
            )
        one = torch.ones(1, 1)  # Clip ranges and cap are checked where they are used; ask there before anything runs.
        self.token_losses(one, one, one, one.bool())
        if self.sampler_cap is not None:
            sampler_correction(one, one, self.sampler_cap)

    @property
    def steps_per_batch(self) -> int:
        """Optimiser steps of a batch of rollouts at most; one without a live row has a single one."""
        return self.updates_per_batch * self.mini_batches

    def token_losses(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """`clipped_surrogate` with the options that are set here, ``[B, T]``."""
        return clipped_surrogate(
            logprobs,
            old_logprobs,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
            mask=mask,
            level=self.level,
            surrogate=self.surrogate,
        )


@dataclass(frozen=True, kw_only=True)
class LossCounts:
    """Denominators of one optimiser step, over all micro-batches and ranks."""

    num_rollouts: int
    num_tokens: int


def advantages(batch: RolloutBatch, objective: Objective) -> Tensor:
    """``[B]``: rewards beside those of the group, on the scale that the objective asks for, over all ranks."""
    assert batch.rewards is not None
    scale, size = objective.scale_rewards, objective.group_size
    std = all_rows(batch.rewards).std() if scale == "batch" else None
    means = all_rows(batch.rewards.double().reshape(-1, size).mean(1)) if scale == "bnpo" else None
    return group_advantages(batch.rewards, size, scale, std, means)


def loss_mask(batch: RolloutBatch, objective: Objective) -> Tensor:
    """``[B, T]`` bool: the tokens of the loss, in numerator and denominator alike."""
    kept = batch.finished | (not objective.mask_truncated)
    return batch.response_mask & kept[:, None]


def live_rows(batch: RolloutBatch, mask: Tensor, objective: Objective, additive: Tensor | None) -> Tensor:
    """``[B]`` bool: rows that can contribute a gradient. The others need no forward and no backward pass."""
    assert batch.advantages is not None
    everything = objective.kl_coefficient > 0 or objective.entropy_coefficient > 0 or additive is not None
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


def saved_by_sharing(batch: RolloutBatch, rows: Tensor) -> float:
    """The share of the tokens of some rows that need not be run if each prompt is run once.

    Nothing, if an engine gave rows of a group different prompts.
    """
    if not len(rows):
        return 0.0
    numbers, place = torch.unique(batch.group, return_inverse=True)
    first = torch.zeros_like(numbers).scatter_reduce(
        0, place, torch.arange(len(batch), device=place.device), "amin", include_self=False
    )
    ids, mask = (t[:, : batch.prompt_width] for t in (batch.input_ids, batch.attention_mask))
    model_row = first[place]
    if not bool(((ids == ids[model_row]) | ~mask).all() & (mask == mask[model_row]).all()):
        return 0.0
    prompts, everything = batch.prompt_lengths.cpu()[rows], batch.lengths.cpu()[rows]
    _, owner, sizes = torch.unique(batch.group.cpu()[rows], return_inverse=True, return_counts=True)
    repeated = (prompts - 1) * (1 - 1 / sizes.double()[owner])
    return float(repeated.sum() / everything.sum())


def costs_behind_prompts(batch: RolloutBatch) -> Tensor:
    """``[B, 2]``: tokens that a row costs behind its prompt: its own, and a quarter for each of the prompt.

    Copies of the prompt's keys and values are kept for the backward pass: of what a token keeps, a quarter at most.
    """
    return torch.stack([batch.response_lengths + 1, (batch.prompt_lengths + 2) // 4], 1)


def prompt_blocks(batch: RolloutBatch, rows: Tensor, objective: Objective) -> Iterator[tuple[Tensor, int]]:
    """Rows cut into blocks of whole groups whose prompts are run together, and how many padded tokens those have.

    Prompts, padded, take at most half of the token budget; one that is longer has a block of its own.
    """
    groups, lengths = batch.group.cpu()[rows], batch.prompt_lengths.cpu()[rows] - 1
    numbers, owner = torch.unique(groups, return_inverse=True)
    longest = torch.zeros(len(numbers), dtype=torch.long).scatter_reduce(0, owner, lengths, "amax")
    for block in micro_batches(longest, max(1, objective.token_budget // 2)):
        yield rows[torch.isin(owner, block)], len(block) * int(longest[block].max())


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
    losses = objective.token_losses(logprobs, old, advantages, mask)
    if objective.sampler_cap is not None:
        losses = losses * _correction(batch, old, objective.sampler_cap)
    ratio = importance_ratio(logprobs, old, mask, objective.level)
    sums = dict(_sums(stats, ratio.detach(), advantages, mask, objective))
    if batch.sampling_logprobs is not None:
        sums[SAMPLER_GAP] = masked_sum((old.detach() - batch.sampling_logprobs).abs(), mask)
    if batch.ref_logprobs is not None:
        # The token's own ratio, also where the surrogate takes the sequence's: it corrects for who drew the token.
        own = importance_ratio(logprobs, old, mask, "token") if objective.kl_corrected else None
        kl = kl_estimate(logprobs, batch.ref_logprobs, objective.kl_estimator, ratio=own)
        losses = losses + objective.kl_coefficient * kl
        plain = kl_estimate(logprobs.detach(), batch.ref_logprobs, objective.kl_estimator)
        sums["kl"] = masked_sum(plain, mask)
    if objective.entropy_coefficient:
        assert stats.entropy is not None
        losses = losses - objective.entropy_coefficient * stats.entropy
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
        yield "entropy", masked_sum(stats.entropy.detach(), mask)


def _correction(batch: RolloutBatch, old: Tensor, cap: float) -> Tensor:
    if batch.sampling_logprobs is None:
        raise ValueError(
            "`objective.sampler_cap` needs the log-probabilities of the sampler, but this engine reports none. Use an "
            "engine that does, or set it to null."
        )
    return sampler_correction(old, batch.sampling_logprobs, cap)

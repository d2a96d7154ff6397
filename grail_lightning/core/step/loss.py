"""The tokens in the loss, the counts by which it is divided, and its summand for each micro-batch.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.core.functional.policy_gradient import aggregate, importance_ratio, kl_estimate
from grail_lightning.core.functional.tokens import TokenStats, masked_sum
from grail_lightning.core.objective import Companion, Objective
from grail_lightning.core.rollout.batch import GradedBatch, RolloutBatch
from grail_lightning.core.runtime.collectives import all_reduce

SAMPLER_GAP = "sampling/sampling_logp_difference/mean"


def loss_mask(batch: GradedBatch, objective: Objective) -> Tensor:
    """``[B, T]`` bool: the tokens in the loss, for numerator and denominator alike.

    Rollouts without a reward are left out, and with `mask_truncated` those that hit the length limit.
    """
    rows = batch.scored & batch.finished if objective.mask_truncated else batch.scored
    return batch.response_mask & rows[:, None]


def live_rows(
    batch: RolloutBatch, mask: Tensor, additive: Tensor | None = None, *, all_rows: bool, refreshes: bool = False
) -> Tensor:
    """``[B]`` bool: rows with a token in the loss and an advantage other than 0; with `all_rows`, with any advantage.

    A row whose advantage is 0 is trained on, too, where a credit method has an additive stage ``[B, T]``. If the method
    `refreshes` its weights, later ones may add to any row.
    """
    live = (batch.advantages != 0) | all_rows
    if additive is not None:
        live = live | (additive != 0).any(1) | refreshes
    return mask.any(1) & live


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """The tensors from which the loss of a micro-batch is computed; ``[b, t]``, unless a comment says otherwise."""

    stats: TokenStats  # Log-probabilities with gradient, and entropy.
    old_logprobs: Tensor  # Under the weights from before the batch's first step.
    token_advantages: Tensor  # Token weights and the additive stage included.
    mask: Tensor  # Bool, the tokens in the loss.
    ref_logprobs: Tensor | None = None  # Under the frozen reference; None without a KL term.
    sampling_logprobs: Tensor | None = None  # As the engine reports them; None if it reports none.
    companion: Companion | None = None  # Adds to the losses by the divergence that the pass has measured.
    row_advantages: Tensor | None = None  # [b], which a companion asks for.
    sampler_correction: Tensor | None = None  # Corrects for a sampler that differs from the trainer; None is off.


def count_denominators(mask: Tensor, rows: Tensor, max_response_length: int) -> dict[str, int]:
    """The denominators of an optimiser step for every aggregation, which `aggregate` takes by name.

    They count the rows of the step, on all ranks, that have a token in the loss. Rows whose advantage is 0, which are
    not run, are among them; truncated rows that are left out are not.
    """
    counted = mask[rows.to(mask.device)]
    rollouts, tokens = all_reduce(torch.stack([counted.any(1).sum(), counted.sum()]), "sum").tolist()
    return {"num_rollouts": rollouts, "num_tokens": tokens, "max_response_length": max_response_length}


def micro_batch_loss(
    inputs: LossInputs, objective: Objective, denominators: dict[str, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The summand of this micro-batch in the optimiser step's loss, a scalar.

    Also, detached and by name, sums over its tokens in the loss, with that scalar as ``loss``.
    """
    logprobs, old, mask = inputs.stats.logprobs, inputs.old_logprobs, inputs.mask
    losses = objective.token_losses(logprobs, old, inputs.token_advantages, mask)
    if inputs.sampler_correction is not None:
        losses = losses * inputs.sampler_correction
    sums = dict(_sums(inputs, objective))
    if inputs.ref_logprobs is not None:
        # Corrected by the token's own ratio, also if the surrogate uses the ratio of the sequence.
        token_ratio = importance_ratio(logprobs, old, mask, "token") if objective.kl_corrected else None
        losses = losses + objective.kl_coefficient * kl_estimate(
            logprobs, inputs.ref_logprobs, objective.kl_estimator, ratio=token_ratio
        )
        sums["kl"] = masked_sum(kl_estimate(logprobs.detach(), inputs.ref_logprobs, objective.kl_estimator), mask)
    if inputs.companion is not None:
        divergence, advantages = inputs.stats.divergence, inputs.row_advantages
        assert divergence is not None, "a pass beside a companion measures the divergence from it"
        assert advantages is not None
        losses = losses + inputs.companion.losses(divergence, advantages)
        sums[inputs.companion.figure] = masked_sum(divergence.detach(), mask)
    if objective.entropy_coefficient:
        losses = losses - objective.entropy_coefficient * inputs.stats.entropy
    loss = aggregate(losses, mask, objective.aggregation, **denominators)
    return loss, sums | {"loss": loss.detach()}


def _sums(inputs: LossInputs, objective: Objective) -> Iterator[tuple[str, Tensor]]:
    mask, advantages = inputs.mask, inputs.token_advantages
    ratio = importance_ratio(inputs.stats.logprobs.detach(), inputs.old_logprobs, mask, objective.level)
    low = (ratio < 1 - objective.clip_low) & (advantages < 0) & mask
    high = (ratio > 1 + objective.clip_high) & (advantages > 0) & mask
    yield "loss_tokens", mask.sum()
    yield "clip_ratio/low_mean", low.sum()
    yield "clip_ratio/high_mean", high.sum()
    yield "clip_ratio/region_mean", (low | high).sum()
    yield "entropy", masked_sum(inputs.stats.entropy.detach(), mask)
    if inputs.sampling_logprobs is not None:
        reported = mask & ~inputs.sampling_logprobs.isnan()
        yield SAMPLER_GAP, masked_sum((inputs.old_logprobs - inputs.sampling_logprobs).abs(), reported)

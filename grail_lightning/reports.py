"""Figures of one training batch, over all ranks, under the names that GRPO users know.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from grail_lightning.functional.attribution import ess_ratio, pairwise_auroc, top_mass
from grail_lightning.functional.policy_gradient import EQUAL_REWARDS
from grail_lightning.objective import token_advantages
from grail_lightning.ranks import all_rows, means, sums
from grail_lightning.rollout import GradedAnswer, Mean, RolloutBatch, StepKind, TokenWeights


def rollout_report(batch: RolloutBatch, verdicts: Sequence[GradedAnswer] = ()) -> dict[str, float]:
    """Rewards, verdicts, lengths, dead groups: by total reward, and by correctness alone.

    `entropy_sampled` is −mean log π of the sampled tokens of *all* rollouts.
    """
    assert batch.rewards is not None
    assert batch.correct is not None
    rewards, lengths = all_rows(batch.rewards), all_rows(batch.response_lengths).float()
    ended = lengths[all_rows(batch.finished)]
    report = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(),
        "accuracy": all_rows(batch.correct).float().mean(),
        "frac_reward_zero_std": all_rows(_in_dead_group(batch, batch.rewards)).float().mean(),
        "frac_correct_zero_std": all_rows(_in_dead_group(batch, batch.correct.float())).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - all_rows(batch.finished).float().mean(),
    }
    if len(ended):
        report["completions/mean_terminated_length"] = ended.mean()
    if batch.sampling_logprobs is not None:
        report["entropy_sampled"] = -all_rows(batch.sampling_logprobs[batch.response_mask]).mean()
    return {name: float(value) for name, value in report.items()} | _shares(batch, verdicts)


def _shares(batch: RolloutBatch, verdicts: Sequence[GradedAnswer]) -> dict[str, float]:
    """Shares of the verdicts, and means of the parts of the reward over the rows on which they have an opinion."""
    parts = {name: part[~part.isnan()] for name, part in batch.reward_values.items()}
    rewards = means({f"rewards/{name}/mean": Mean(float(part.sum()), len(part)) for name, part in parts.items()})
    statuses = Counter(verdict.status for verdict in verdicts)
    # These three are logged also where they are zero: a curve that ends is read as a run that ended.
    kinds = {"timeout", "crashed", "missing"} | statuses.keys() if verdicts else set()
    # A rank may not have met a status, but its rows count.
    counts = sums({f"verdict/{kind}": float(statuses[kind]) for kind in kinds} | {"rows": float(len(verdicts))})
    rows = counts.pop("rows")
    return rewards | {name: count / rows for name, count in counts.items()}


def credit_report(
    batch: RolloutBatch, weights: TokenWeights, steps: dict[StepKind, Tensor] | None, entropies: Tensor | None = None
) -> dict[str, float]:
    """How the weights are spread, how concentrated the credit is, and whether it finds the flawed tokens.

    Args:
        batch: ``B`` rows with advantages.
        weights: Their token weights.
        steps: Masks ``[B, T]`` of labelled steps, where the task can tell and there are scores to judge; see
            `grail_lightning.locate.step_masks`.
        entropies: ``[B, T]`` in nats; zero on rows that have none.
    """
    assert batch.advantages is not None
    mask = batch.response_mask
    credit = token_advantages(batch.advantages, weights.values, weights.additive)
    values = all_rows(weights.values[mask])
    report = {
        "credit/weight_mean": values.mean(),
        "credit/weight_std": values.std(),
        "credit/span_missing": all_rows(weights.fallback).float().mean(),
        "credit/ess_ratio": all_rows(ess_ratio(credit, mask)).nanmean(),
        "credit/top10_mass": all_rows(top_mass(credit, mask)).nanmean(),
    }
    if weights.scores is not None:
        # Reached on every rank: whether this rank has labelled rows must not decide about a collective.
        none = torch.zeros_like(mask)
        scored = (weights.scores != 0).any(1, keepdim=True) & mask
        if entropies is not None:
            # Rows that the update left out (truncated ones, say) have none; all three scorers are judged on the same.
            scored = scored & (entropies != 0).any(1, keepdim=True)
        flawed = scored & (none if steps is None else steps["slip"] | steps["misconception"])
        sound = scored & (none if steps is None else steps["sound"])
        report["credit/flawed_token_auroc"] = all_rows(pairwise_auroc(weights.scores, flawed, sound)).nanmean()
        if batch.sampling_logprobs is not None:
            # The trivial scorer beside it: unlikely tokens.
            surprisal = pairwise_auroc(-batch.sampling_logprobs, flawed, sound)
            report["credit/flawed_token_auroc_surprisal"] = all_rows(surprisal).nanmean()
        if entropies is not None:
            # And the other one: tokens where the policy is undecided.
            undecided = pairwise_auroc(entropies, flawed, sound)
            report["credit/flawed_token_auroc_entropy"] = all_rows(undecided).nanmean()
        # Without either there is 0/0, which is left out below.
        on_flawed, on_sound = all_rows(weights.values[flawed]), all_rows(weights.values[sound])
        report["credit/flawed_to_sound_weight"] = on_flawed.mean() / on_sound.mean()
    figures = {name: float(value) for name, value in report.items()}
    figures |= means({f"credit/{name}": _as_mean(value, len(batch)) for name, value in weights.metrics.items()})
    # A batch without a scored or labelled row has nothing to say; a NaN would break plots.
    return {name: value for name, value in figures.items() if value == value}


def _as_mean(value: float | Mean, rows: int) -> Mean:
    """A plain number is a mean over this rank's rows; NaN has seen none."""
    if isinstance(value, Mean):
        return value
    return Mean(0.0, 0) if math.isnan(value) else Mean(value * rows, rows)


def _in_dead_group(batch: RolloutBatch, values: Tensor) -> Tensor:
    """``[B]`` bool: rows whose whole group has the same of ``values [B]``."""
    dead = torch.zeros(len(batch), dtype=torch.bool, device=values.device)
    for group in set(batch.group.tolist()):
        rows = batch.group == group
        dead[rows] = values[rows].max() - values[rows].min() <= EQUAL_REWARDS
    return dead

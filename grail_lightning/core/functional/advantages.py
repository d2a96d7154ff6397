"""Advantages: each reward, of a rollout, a turn or a token, relative to the rewards of its group.

Shapes: ``N`` rollouts, ``M`` groups of the rank, ``K`` groups of all ranks, ``B`` rows, ``T`` response tokens,
``U`` turns of the row that has the most.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from grail_lightning.core.functional.tokens import running_sum

Scaling = Literal["none", "group", "batch", "bnpo"]

SCALE_EPS = 1e-4
# Rewards of one group that differ by less than this count as equal: a rounding error must not become an advantage.
EQUAL_REWARDS = 1e-6
_LARGEST_SCALE = 1e6
# Means with a smaller variance are equal except for rounding.
_EQUAL_MEANS = 1e-12
# Means of float32 rewards may lie outside [0, 1] by rounding.
ROUNDING = 1e-5


def group_advantages(
    rewards: Tensor,
    group_size: int,
    scale: Scaling = "none",
    batch_std: Tensor | float | None = None,
    batch_means: Tensor | None = None,
    *,
    baseline: float | Tensor = 1.0,
    train_equal: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Each rollout's reward less a baseline of its group.

    .. math:: A_i = (r_i - b_{group}) / (s + 10^{-4}), \qquad b_{group} = c\,\bar r_{group}

    ``s`` is the unbiased standard deviation of the group (``scale="group"``) or of the batch (``"batch"``). ``"none"``
    does not divide, and ``"bnpo"`` multiplies each group by `beta_scale` instead. A group whose rewards are all equal
    has ``A = 0`` exactly, unless `train_equal` is set and its baseline differs from its rewards.

    A reward of NaN is none: such a rollout has ``A = 0``, and has no part in the mean and the deviation of its group. A
    group with fewer than two other rewards has ``A = 0``. All statistics are float64, so that a large offset of the
    rewards (``1e8 + correct``) leaves their differences as they are.

    With any baseline that does not depend on the row itself, the policy gradient has the same expected direction. Its
    noise differs, and so does what is praised and blamed: with ``c = 0`` and rewards of 0 and 1 only right rollouts are
    trained on. A baseline other than the mean depends on where the rewards' zero is.

    Args:
        rewards: ``[N]``, rows of one group next to each other; the result has this shape. NaN for rows without one.
        group_size: The number of rollouts of a group; one alone is a ValueError.
        scale: none | group | batch | bnpo.
        batch_std: The unbiased standard deviation of all rewards over all ranks, for ``"batch"``.
        batch_means: ``[K]``, the mean rewards of all groups that have one, over all ranks, for ``"bnpo"``.
        baseline: The share ``c`` of the group's mean reward, or the baselines ``[M]`` themselves (`energy_baselines`).
        train_equal: Whether groups whose rewards are all equal are trained on where their baseline is another.
        dtype: That of the result; default that of the rewards.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; Dr. GRPO, arXiv 2503.20783, section 3; BNPO, arXiv 2506.02864.
    """
    if group_size < 2:
        raise ValueError(f"`group_size` must be at least 2, but got {group_size}: a rollout is judged beside others.")
    if len(rewards) % group_size:
        raise ValueError(f"`rewards` must hold whole groups of {group_size}, but got {len(rewards)} rows.")
    groups = rewards.double().reshape(-1, group_size)
    scored, means = ~groups.isnan(), groups.nanmean(1)
    of_group = baseline.to(groups) if isinstance(baseline, Tensor) else baseline * means
    # Differences are cast, not the rewards, whose offset may be large.
    centred = (groups - of_group[:, None]).to(dtype or rewards.dtype)
    dead = (reward_ranges(groups) <= EQUAL_REWARDS)[:, None]
    if train_equal:
        dead = dead & (centred.abs() <= EQUAL_REWARDS)
    advantages = _scaled(centred, groups, scale, batch_std, batch_means)
    return advantages.masked_fill(dead | ~scored | (scored.sum(1, keepdim=True) < 2), 0).reshape(-1)


def _scaled(
    centred: Tensor, groups: Tensor, scale: Scaling, batch_std: Tensor | float | None, batch_means: Tensor | None
) -> Tensor:
    """The centred rewards ``[M, G]`` of the groups over their divisor; see `group_advantages`."""
    match scale:
        case "none":
            return centred
        case "group":
            return centred / (_unbiased_std(groups).to(centred) + SCALE_EPS)
        case "batch":
            if batch_std is None:
                raise ValueError('`scale="batch"` needs `batch_std`, the std of all rewards over all ranks.')
            std = torch.as_tensor(batch_std, dtype=torch.float64).to(centred)
            return centred / (std + SCALE_EPS)
        case "bnpo":
            if batch_means is None:
                raise ValueError('`scale="bnpo"` needs `batch_means`, the mean rewards of all groups over all ranks.')
            return centred * beta_scale(groups.nanmean(1), batch_means)[:, None].to(centred)
        case _:
            raise ValueError(f"`scale` must be one of none, group, batch, bnpo, but got {scale!r}.")


def reward_ranges(groups: Tensor) -> Tensor:
    """``[M]``: the largest difference of two rewards of each group ``[M, G]``; below 0 for a group that has none."""
    unscored = groups.isnan()
    return groups.masked_fill(unscored, -torch.inf).amax(1) - groups.masked_fill(unscored, torch.inf).amin(1)


def _unbiased_std(groups: Tensor) -> Tensor:
    """``[M, 1]``: the unbiased standard deviation of the rewards of each group ``[M, G]``; 0 where it has but one."""
    squares = (groups - groups.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / ((~groups.isnan()).sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def leave_one_out_factor(rewards: Tensor, group_size: int) -> Tensor:
    r"""``[N]`` float64: :math:`n / (n - 1)`, from the reward less its group's mean to that less the others'.

    ``n`` is the number of rows of the group that have a reward (not NaN) of ``rewards [N]``; 1 where it is below 2.
    """
    number = (~rewards.isnan()).double().reshape(-1, group_size).sum(1)
    return torch.where(number > 1, number / (number - 1), 1).repeat_interleave(group_size)


def standardised_values(values: Tensor, group_size: int) -> Tensor:
    r"""Each column of ``values [N, K]`` relative to the group, :math:`(v - \bar v) / (s + 10^{-4})`; NaN stays NaN.

    ``s`` is the unbiased standard deviation of the group's values that are not NaN, 0 for a single one.
    """
    groups = values.double().reshape(-1, group_size, values.shape[1]).transpose(1, 2).reshape(-1, group_size)
    relative = (groups - groups.nanmean(1, keepdim=True)) / (_unbiased_std(groups) + SCALE_EPS)
    return relative.reshape(-1, values.shape[1], group_size).transpose(1, 2).reshape(values.shape)


def energy_baselines(
    rewards: Tensor, counted: Tensor, group_size: int, pooled_rewards: Tensor, pooled_energies: Tensor
) -> Tensor:
    r"""The baseline of each group with the least noise, if a row's gradient depends on its reward alone.

    .. math:: b_{group} = \frac{\sum_j \bar W(r_j)\, r_j}{\sum_j \bar W(r_j)}, \qquad
              \bar W(r) = \text{mean of } W_k \text{ over the pooled rows with } r_k = r

    The sums run over the rows of the group that are `counted` ``[N]``, all of which have a reward. ``W`` is the squared
    norm of the gradient of a row's log-probability; `pooled_energies` ``[K]`` are those of rows with the
    `pooled_rewards`, over all ranks. The variance of ``(r_j - b) g_j`` is least at ``b = E[W r] / E[W]``. ``[M]``
    float64; the group's mean where a reward of the group is not among the pooled ones.

    Source: the optimal constant baseline of Greensmith et al., JMLR 5 (2004), section 4; pooling is ours.
    """
    groups, counted = rewards.double().reshape(-1, group_size), counted.reshape(-1, group_size)
    keys, pooled = ((r.double() / EQUAL_REWARDS).round().long() for r in (groups, pooled_rewards))
    values, place, number = torch.unique(pooled, return_inverse=True, return_counts=True)
    energy = torch.zeros(len(values), dtype=torch.float64, device=rewards.device)
    energy = energy.index_add(0, place, pooled_energies.double()) / number
    has_energies = (torch.isin(keys, values) | ~counted).all(1)
    weights = torch.ones_like(groups)
    if len(values):
        weights = energy[torch.searchsorted(values, keys).clamp(max=len(values) - 1)]
    weights = weights * counted
    total = weights.sum(1)
    optimal = (weights * groups.masked_fill(~counted, 0)).sum(1) / total
    return torch.where(has_energies & (total > 0), optimal, groups.nanmean(1))


def group_sums(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of ``values [N]`` over the rows of each row's group, and the number of these rows; ``[N]`` each."""
    _, place, size = torch.unique(group, return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return total[place], size[place]


def group_std(values: Tensor, group: Tensor) -> Tensor:
    """``[N]``: the unbiased standard deviation of ``values [N]`` over each row's group; 0 for a group of one."""
    total, size = group_sums(values, group)
    squares, _ = group_sums((values - total / size).square(), group)
    return (squares / (size - 1).clamp(min=1)).sqrt()


def beta_scale(means: Tensor, batch_means: Tensor) -> Tensor:
    r"""The factor by which BNPO multiplies the centred rewards of each group.

    .. math::
        s(p) = \min\bigl(1 / \mathrm{Beta}(p; \alpha, \beta),\ 10^6\bigr), \quad
        \alpha = \max(1, 1 + a/3),\ \beta = \max(1, 1 + b/3)

    ``a`` and ``b`` are the parameters of the Beta distribution with the mean ``m`` and the unbiased variance ``v`` of
    the batch's group means, :math:`a = (m(1-m)/v - 1)\,m` and :math:`b = (m(1-m)/v - 1)(1-m)`. With one group, or if
    all means are equal, the scale is 1. A group far from all others has a small density and therefore a large scale.

    The model needs means within [0, 1], as right-or-wrong rewards and fractions have. Signed rewards (±1) and rewards
    with negative penalties may have means outside, where the density is 0 and the scale would be a million.

    From `means` ``[M]`` and `batch_means` ``[K]`` to ``[M]`` float64, finite and positive.

    Source: BNPO, arXiv 2506.02864, and its published code.
    """
    means, everyone = means.double(), batch_means.double()
    # Checked for all groups, so that all ranks raise together.
    outside = (everyone < -ROUNDING) | (everyone > 1 + ROUNDING)
    if outside.any():
        raise ValueError(
            "`BNPO` needs groups whose mean reward lies in [0, 1], but got "
            f"{everyone[outside][0].item():.4g}. Scale the rewards to [0, 1], or use `GroupMean` with `scale: group`."
        )
    if len(everyone) < 2 or everyone.var() <= _EQUAL_MEANS:
        return torch.ones_like(means)
    mean = everyone.mean().clamp(0, 1)
    size = mean * (1 - mean) / everyone.var() - 1
    above_one = torch.stack([size * mean, size * (1 - mean)]).clamp(min=0) / 3  # α − 1 and β − 1
    p = means.clamp(0, 1)
    log_norm = torch.lgamma(above_one + 1).sum() - torch.lgamma(above_one.sum() + 2)
    # `xlogy` is 0 where α or β is 1, also at p = 0 or 1.
    log_density = torch.special.xlogy(above_one[0], p) + torch.special.xlog1py(above_one[1], -p) - log_norm
    scale: Tensor = (-log_density).clamp(max=math.log(_LARGEST_SCALE)).exp()
    return scale


def process_advantages(
    rewards: Tensor, outcomes: Tensor, mask: Tensor, group: Tensor, *, weight: float = 1.0, discount: float = 1.0
) -> Tensor:
    r"""The outcome and the return of the token rewards, each relative to the other rows of the group.

    .. math:: A_{it} = o_i - \frac{1}{n-1} \sum_{j \ne i} o_j
              + c \sum_{s \ge t} \gamma^{s-t} \Bigl(r_{is} - \frac{1}{n-1} \sum_{j \ne i} \bar r_j\Bigr)

    ``n`` is the number of rows of the group, and ``\bar r_j`` is the mean reward of the tokens of row ``j``. A row that
    is alone in its group has the baseline 0. Distances ``s - t`` count the tokens of the mask.

    From token rewards ``r [B, T]`` and outcomes ``o [B]`` to ``[B, T]`` float64, zero outside the mask; `weight` is c
    and `discount` γ.

    Source: PRIME, arXiv 2502.01456, equation 5.
    """
    rewards, outcomes = rewards.double().masked_fill(~mask, 0), outcomes.double()
    means = rewards.sum(1) / mask.sum(1).clamp(min=1)
    centred = rewards - _others(means, group)[:, None]
    returns = discounted_returns(centred.masked_fill(~mask, 0), discount, mask)
    advantages: Tensor = (outcomes - _others(outcomes, group))[:, None] + weight * returns
    return advantages.masked_fill(~mask, 0)


def discounted_returns(rewards: Tensor, discount: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""``[B, T]``: the return from each token on, :math:`\sum_{s \ge t} \gamma^{s-t} r_s`, of rewards 0 on padding.

    Tokens outside a `mask` do not count in the distance ``s - t``; None counts all.
    """
    if discount == 1:
        return running_sum(rewards.flip(1), 1).flip(1)
    returns = rewards.clone()
    factors = torch.full_like(rewards, discount)
    if mask is not None:
        factors = factors.masked_fill(~mask, 1)
    for t in range(rewards.shape[1] - 2, -1, -1):
        returns[:, t] += factors[:, t] * returns[:, t + 1]
    return returns


def ranked_pairs(scores: Tensor, correct: Tensor, group: Tensor) -> tuple[float, int]:
    """Pairs of a right and a wrong row of a group whose right row scores higher (a tie is half), and all pairs."""
    pairs = (group[:, None] == group) & correct[:, None] & ~correct
    gaps = (scores[:, None] - scores)[pairs]
    return float((gaps > 0).sum()) + 0.5 * float((gaps == 0).sum()), int(pairs.sum())


def _others(values: Tensor, group: Tensor) -> Tensor:
    """``[B]``: the mean over the other rows of the group; 0 where there is none."""
    total, size = group_sums(values, group)
    mean = (total - values) / (size - 1).clamp(min=1)
    return mean.masked_fill(size == 1, 0)


# --- rollouts of several turns ----------------------------------------------------------------------------------------


def turn_numbers(mask: Tensor, turn: Tensor | None) -> Tensor:
    """``[B, T]`` long: the number of the turn of each sampled token (the `mask`), −1 elsewhere.

    Without ``turn [B, T]`` all sampled tokens of a row are one turn.
    """
    return (torch.zeros_like(mask, dtype=torch.long) if turn is None else turn).masked_fill(~mask, -1)


def existing_turns(numbers: Tensor) -> Tensor:
    """``[B, U]`` bool: the turns that each row has; U is at least 1, and a row without a token has none."""
    last = torch.nn.functional.pad(numbers, (0, 1), value=-1).amax(1)
    return torch.arange(max([1, *(last + 1).tolist()]), device=numbers.device) <= last[:, None]


def turn_starts(numbers: Tensor, turns: int) -> Tensor:
    """``[B, U]`` long: the column of the first sampled token of each of `turns` turns; T for one that does not exist.

    A turn without a token begins where the next one does.
    """
    rows, width = numbers.shape
    columns = torch.arange(width, device=numbers.device).expand(rows, -1)
    first = numbers.new_full((rows, turns + 1), width).scatter_reduce(1, numbers + 1, columns, "amin")[:, 1:]
    return first.flip(1).cummin(1).values.flip(1)


def sum_by_turn(values: Tensor, numbers: Tensor, turns: int) -> Tensor:
    """``[B, T] -> [B, U]``: the sum over the sampled tokens of each turn."""
    return values.new_zeros(len(values), turns + 1).scatter_add(1, numbers + 1, values)[:, 1:]


def spread_turns(values: Tensor, numbers: Tensor) -> Tensor:
    """``[B, U] -> [B, T]``: the value of its turn on each sampled token, 0 elsewhere."""
    return values.gather(1, numbers.clamp(min=0)).masked_fill(numbers < 0, 0)


def relative(values: Tensor, key: Tensor, counted: Tensor, *, standardise: bool = False) -> Tensor:
    r"""``[B, U]``: each counted value beside the counted ones with the same key, 0 for the others.

    .. math:: z_n = x_n - \bar x, \qquad \text{or standardised } z_n = (x_n - \bar x) / (s + 10^{-4})

    Mean and unbiased standard deviation ``s`` are those of the values with the key, ``[B, U]`` or ``[B, 1]``. Values
    that are all equal, such as a single one, have exactly 0: a rounding error must not become an advantage.
    """
    counted_values, same = values[counted], key.expand_as(values)[counted]
    (total, size), std = group_sums(counted_values, same), group_std(counted_values, same)
    centred = counted_values - total / size
    scaled = centred / (std + SCALE_EPS) if standardise else centred
    return torch.zeros_like(values).masked_scatter(counted, scaled.masked_fill(std <= EQUAL_REWARDS, 0))


def last_turns(exists: Tensor) -> Tensor:
    """``[B, U]`` bool: the last turn of each row."""
    return exists & ~torch.nn.functional.pad(exists[:, 1:], (0, 1))


def turn_changes(values: Tensor, outcomes: Tensor, exists: Tensor) -> Tensor:
    r"""``[B, U]``: the change of value that each turn makes, 0 for turns that do not exist.

    .. math:: \delta_u = V(s_{u+1}) - V(s_u), \qquad \delta_{last} = r - V(s_{last})

    From the values ``[B, U]`` of the states in which turns begin, and the outcomes ``r [B]``.
    """
    after = torch.where(last_turns(exists), outcomes[:, None], values.roll(-1, 1))
    return (after - values).masked_fill(~exists, 0)

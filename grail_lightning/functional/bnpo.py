"""BNPO's scale of each group: the inverse density of its mean reward under a Beta distribution.

Shapes: ``M`` groups of the rank, ``K`` groups of all ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_SCALE = 1e6
# Means with a smaller variance are equal except for rounding.
EQUAL_MEANS = 1e-12
# Means of float32 rewards may lie outside [0, 1] by rounding.
ROUNDING = 1e-5


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

    Args:
        means: ``[M]``, the groups' mean rewards.
        batch_means: ``[K]``, the mean rewards of all groups over all ranks.

    Returns:
        ``[M]`` float64, finite and positive.

    Raises:
        ValueError: If a mean reward of the batch is not in [0, 1].

    Source: BNPO, arXiv 2506.02864, and its published code.
    """
    means, everyone = means.double(), batch_means.double()
    # Checked for all groups, so that all ranks raise together.
    outside = (everyone < -ROUNDING) | (everyone > 1 + ROUNDING)
    if outside.any():
        raise ValueError(
            "`scale_rewards: bnpo` needs groups whose mean reward lies in [0, 1], but got "
            f"{everyone[outside][0].item():.4g}. Scale the rewards to [0, 1], or use `scale_rewards: group`."
        )
    if len(everyone) < 2 or everyone.var() <= EQUAL_MEANS:
        return torch.ones_like(means)
    mean = everyone.mean().clamp(0, 1)
    size = mean * (1 - mean) / everyone.var() - 1
    above_one = torch.stack([size * mean, size * (1 - mean)]).clamp(min=0) / 3  # α − 1 and β − 1
    p = means.clamp(0, 1)
    log_norm = torch.lgamma(above_one + 1).sum() - torch.lgamma(above_one.sum() + 2)
    # `xlogy` is 0 where α or β is 1, also at p = 0 or 1.
    log_density = torch.special.xlogy(above_one[0], p) + torch.special.xlog1py(above_one[1], -p) - log_norm
    scale: Tensor = (-log_density).clamp(max=math.log(LARGEST_SCALE)).exp()
    return scale

r"""Intervals and tests of shares of solved problems. Only numpy and scipy.

Shapes: ``N`` problems of a dataset. A *share* is a figure of one problem in [0, 1]:
the share of its samples that are right, or its pass@k. Its *noise* is its variance over other samples of the same
problem (`grail_lightning.functional.pass_at_k_variance`).

Problems are a random sample of a population. `seeds` adds several seeds and datasets.
``docs/report.md`` tells how the methods were chosen; ``benchmarks/interval_coverage.py`` measures their coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri, stdtrit

UPPER = 0.975  # The upper limit of a 95 % interval.
# Up to this many problems with a difference, all their signs are enumerated (a million sums).
MOST_ENUMERATED = 20
Interval = tuple[float, float]
Floats = NDArray[np.float64]


def mean_interval(shares: ArrayLike, noise: ArrayLike) -> Interval:
    r"""The 95 % interval of a mean over problems: Wilson's interval for the effective number of problems.

    With the mean :math:`\bar x` and the variance :math:`v` of one problem's share the effective number of problems is

    .. math:: n^* = \max(N, N \bar x (1 - \bar x) / v \cdot (z / t_{N-1})^2)

    :math:`v` is the larger of the variance of the shares and the mean of their `noise`, since shares that are all the
    same do not show how much they would vary between repetitions. A share cannot vary more than a binary outcome, so
    :math:`n^*` is at least :math:`N`; for binary outcomes the result is Wilson's interval.

    Args:
        shares: ``[N]`` float in [0, 1]: the solved share of each problem.
        noise: ``[N]`` float: the variance of each share over other samples of the same problem.

    Source: the effective sample size with its quantiles is Korn and Graubard's (Survey Methodology 24, 1998); with
    Wilson's interval it is recommended for clustered samples by Franco, Little, Louis and Slud (2019,
    https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503). The floor of :math:`v` is ours.
    """
    values = np.asarray(shares, dtype=float)
    if not len(values):
        return math.nan, math.nan
    number, mean, z = len(values), float(values.mean()), float(ndtri(UPPER))
    effective = float(number)
    if number > 1 and (variance := max(float(values.var(ddof=1)), float(np.mean(np.asarray(noise))))):
        effective = max(effective, number * mean * (1 - mean) / variance * (z / t_quantile(number - 1)) ** 2)
    centre = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    spread = math.sqrt(mean * (1 - mean) / effective + z**2 / (4 * effective**2))
    half = z * spread / (1 + z**2 / effective)
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(differences: ArrayLike, noise: ArrayLike) -> Interval:
    r"""The 95 % interval of a mean of paired differences: Student's, with two pseudo-problems.

    Few problems may differ at all, and a variance that is estimated from them is too small. Two problems with the
    differences +1 and −1 are therefore added, each with the weight
    :math:`f = \max(\overline{d^2}, \text{noise}) / \overline{|d|}`, at most 1.

    .. math:: \tilde d = \frac{\sum d}{N + 2f}, \quad
        \tilde v = \max\Bigl(\frac{\sum d^2 + 2f}{N + 2f} - \tilde d^2, \text{noise}\Bigr), \quad
        \tilde d \pm t_{N-1} \sqrt{\tilde v / (N + 2f)}

    Args:
        differences: ``[N]`` float in [−1, 1]: a problem's share in one run less that in another.
        noise: ``[N]`` float: the sum of the variances of both shares over other samples of the same problem.

    Source: for binary outcomes it is Bonett and Price's (2012, https://doi.org/10.3102/1076998611411915) with Student's
    quantile. The weight :math:`f` is ours.
    """
    d = np.asarray(differences, dtype=float)
    if not len(d):
        return math.nan, math.nan
    noisy, size, squares = float(np.mean(np.asarray(noise))), float(np.abs(d).mean()), float((d**2).sum())
    weight = min(1.0, max(squares / len(d), noisy) / size) if size else 1.0
    padded = len(d) + 2 * weight
    centre, mean = float(d.sum()) / padded, float(d.mean())
    variance = max((squares + 2 * weight) / padded - centre**2, noisy)
    half = t_quantile(max(len(d) - 1, 1)) * math.sqrt(variance / padded)
    # The limits lie on both sides of the observed mean, however few problems there are.
    return max(-1.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))


def average_interval(
    means: Sequence[float],
    intervals: Sequence[Interval],
    weights: Sequence[float] | None = None,
    least: float = 0.0,
    most: float = 1.0,
) -> Interval:
    r"""The interval of an average of independent means, recovered from their own intervals.

    :math:`L = \sum w_d m_d - \sqrt{\sum w_d^2 (m_d - l_d)^2}`. The upper limit is computed likewise: method of
    variance estimates recovery (Zou and Donner, 2008, https://doi.org/10.1002/sim.3095).

    Args:
        means: One mean for each dataset.
        intervals: The interval of each mean.
        weights: The weight of each mean, with the sum 1; default equal weights (the simple average).
        least: The smallest possible value: 0 for figures, −1 for differences.
        most: The largest one.
    """
    share = np.full(len(means), 1 / len(means)) if weights is None else np.asarray(weights, dtype=float)
    middle, limits = np.asarray(means, dtype=float), np.asarray(intervals, dtype=float)
    centre = float(share @ middle)
    below, above = (math.hypot(*(share * gap)) for gap in (middle - limits[:, 0], limits[:, 1] - middle))
    return max(least, centre - below), min(most, centre + above)


def ratio_interval(sums: Sequence[ArrayLike], counts: Sequence[ArrayLike]) -> Interval:
    r"""The 95 % interval of a mean over responses whose number differs from problem to problem, such as a mean length.

    With a problem's sum :math:`y` over its :math:`x` responses the mean is :math:`R = \sum y / \sum x`. Its variance is
    the jackknife's, which leaves out one problem after the other:

    .. math:: u = \frac{y - R x}{1 - x / X_d}, \quad
        v = \sum_d \frac{N_d - 1}{N_d} \sum_{i \in d} (u_i - \bar u_d)^2 \Big/ \Bigl(\sum_d X_d\Bigr)^2, \quad
        R \pm t \sqrt v

    with the responses :math:`X_d` of a dataset. The degrees of freedom are those of the problems that have such a
    response. If a dataset has only one of them, or none has any, the limits are NaN.

    Args:
        sums: ``[N_d]`` for each dataset: the sum of each problem, not negative.
        counts: ``[N_d]`` for each dataset: the number of responses of each problem.

    Source: the combined ratio estimate of a stratified sample (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    pairs = [(np.asarray(y, dtype=float), np.asarray(x, dtype=float)) for y, x in zip(sums, counts, strict=True)]
    pairs = [(y, x) for y, x in pairs if x.any()]
    having = [int(np.count_nonzero(x)) for _, x in pairs]
    if min(having, default=0) < 2:
        return math.nan, math.nan
    total = sum(float(x.sum()) for _, x in pairs)
    mean = sum(float(y.sum()) for y, _ in pairs) / total
    left_out = [(y - mean * x) / (1 - x / x.sum()) for y, x in pairs]
    variance = sum(float(u.var()) * (len(u) - 1) for u in left_out) / total**2
    half = t_quantile(sum(having) - len(having)) * math.sqrt(variance)
    return max(0.0, mean - half), mean + half


def vote_noise(shares: ArrayLike, num_samples: int, k: int) -> Floats:
    """The variance of each problem's maj@k over other samples: ``m (1 − m) k / n``, as of ``n / k`` binary votes."""
    values: Floats = np.asarray(shares, dtype=np.float64)
    variance: Floats = values * (1 - values) * (k / num_samples)
    return variance


def sign_flip_p(differences: ArrayLike) -> float | None:
    """The exact two-sided p-value of the sign-flip test; None where too many problems differ to enumerate their signs.

    The p-value is the share of all signs of the differences with a sum at least as far from 0 as the observed one. For
    binary outcomes it is McNemar's exact test.

    >>> sign_flip_p([0.5, 0.5, 0.0, 0.5])  # 2 of 2³ signs
    0.25
    """
    values = np.asarray(differences, dtype=float)
    values = values[values != 0]
    if len(values) > MOST_ENUMERATED:
        return None
    sums = np.zeros(1)
    for value in np.abs(values):
        sums = np.concatenate((sums + value, sums - value))
    # Equal sums of other orders differ by rounding.
    tolerance = 1e-9 * float(np.abs(values).sum())
    return float(np.mean(np.abs(sums) >= abs(float(values.sum())) - tolerance))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of a family of tests, corrected by Holm's method. It holds for tests that depend on each other.

    The i-th smallest of m p-values is multiplied by m + 1 − i; a corrected value is not below a smaller one's, and at
    most 1. A NaN is not a test: it stays NaN and does not count.

    Source: Holm, Scandinavian Journal of Statistics 6, 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    tests = np.flatnonzero(~np.isnan(p))
    order = tests[np.argsort(p[tests], kind="stable")]
    corrected = p.copy()
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return [float(value) for value in corrected]


def t_quantile(df: float, level: float = UPPER) -> float:
    """The quantile of Student's distribution."""
    return float(stdtrit(df, level))

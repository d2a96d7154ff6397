r"""The 95 % intervals and the tests of figures: of problems, of datasets together, and of seeds. Only numpy and scipy.

Shapes: ``N`` problems of a dataset, ``S`` seeds (runs of one method). A *share* is a figure of one problem in [0, 1]:
the share of its samples that are right, or its pass@k. Its *noise* is its variance over other samples of the same
problem (`grail_lightning.functional.pass_at_k_variance`). The weights of datasets have the sum 1.

Problems are a random sample of a population, and the seeds of a method of its possible trainings.
The page "Statistics" tells how the methods were chosen; ``benchmarks/interval_coverage.py`` measures their coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtrinc, ndtri, stdtr, stdtrit

_UPPER = 0.975  # The upper limit of a 95 % interval.
_POWER = 0.8
# Up to this many problems with a difference, all their signs are enumerated (a million sums).
_MOST_ENUMERATED = 20
Interval = tuple[float, float]
Floats = NDArray[np.float64]
Share = tuple[Floats, Floats]
"""A figure of each problem ``[N]`` or ``[N, S]``, and its noise in the same shape."""


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """How much the mean over seeds varies with the seeds."""

    variance: float  # The variance of the mean over seeds, estimated from the spread of the seeds' means.
    excess: float  # The part that the seeds themselves cause: without what sampling would cause alone; at least 0.
    df: float  # The degrees of freedom of the variance.


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the limits of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """A paired difference with its 95 % interval and its test."""

    p_value: float  # Two-sided, of the hypothesis that there is no difference; not corrected.
    errors: tuple[tuple[float, float], ...]  # The standard error and the degrees of freedom of each of its tests.

    def detectable(self, comparisons: int = 1) -> float:
        """The smallest true difference that a repetition would find with a probability of 80 %.

        It is as many standard errors as the noncentrality at which Student's test of the level ``0.05 / comparisons``
        has that power; the largest one of its tests.
        """
        level = 1 - (1 - _UPPER) / max(comparisons, 1)
        return max(error * float(nctdtrinc(df, 1 - _POWER, _t_quantile(df, level))) for error, df in self.errors)


# --- problems of one dataset, and of several --------------------------------------------------------------------------


def mean_interval(shares: ArrayLike, noise: ArrayLike) -> Interval:
    r"""The interval of a mean over problems ``[N]``: Wilson's interval for the effective number of problems.

    With the mean :math:`\bar x` and the variance :math:`v` of one problem's share the effective number of problems is

    .. math:: n^* = \max(N, N \bar x (1 - \bar x) / v \cdot (z / t_{N-1})^2)

    :math:`v` is the larger of the variance of the shares and the mean of their noise, since shares that are all the
    same do not show how much they would vary between repetitions. A share cannot vary more than a binary outcome, so
    :math:`n^*` is at least :math:`N`; for binary outcomes the result is Wilson's interval.

    Source: the effective sample size with its quantiles is Korn and Graubard's (Survey Methodology 24, 1998); with
    Wilson's interval it is recommended for clustered samples by Franco, Little, Louis and Slud (2019,
    https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503). The floor of :math:`v` is ours.
    """
    values = np.asarray(shares, dtype=float)
    if not len(values):
        return math.nan, math.nan
    number, mean, z = len(values), float(values.mean()), float(ndtri(_UPPER))
    effective = float(number)
    if number > 1 and (variance := max(float(values.var(ddof=1)), float(np.mean(np.asarray(noise))))):
        effective = max(effective, number * mean * (1 - mean) / variance * (z / _t_quantile(number - 1)) ** 2)
    centre = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    spread = math.sqrt(mean * (1 - mean) / effective + z**2 / (4 * effective**2))
    half = z * spread / (1 + z**2 / effective)
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(differences: ArrayLike, noise: ArrayLike) -> Interval:
    r"""The interval of a mean of paired differences ``[N]`` in [−1, 1]: Student's, with two pseudo-problems.

    Few problems may differ at all, and a variance that is estimated from them is too small. Two problems with the
    differences +1 and −1 are therefore added, each with the weight
    :math:`f = \max(\overline{d^2}, \text{noise}) / \overline{|d|}`, at most 1. The noise ``[N]`` of a difference is the
    sum of that of both shares.

    .. math:: \tilde d = \frac{\sum d}{N + 2f}, \quad
        \tilde v = \max\Bigl(\frac{\sum d^2 + 2f}{N + 2f} - \tilde d^2, \text{noise}\Bigr), \quad
        \tilde d \pm t_{N-1} \sqrt{\tilde v / (N + 2f)}

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
    half = _t_quantile(max(len(d) - 1, 1)) * math.sqrt(variance / padded)
    # The limits lie on both sides of the observed mean, however few problems there are.
    return max(-1.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))


def average_interval(means: Sequence[float], intervals: Sequence[Interval], weights: Sequence[float]) -> Interval:
    r"""The interval of an average of independent means, recovered from their own intervals.

    :math:`L = \sum w_d m_d - \sqrt{\sum w_d^2 (m_d - l_d)^2}`. The upper limit is computed likewise: method of
    variance estimates recovery (Zou and Donner, 2008, https://doi.org/10.1002/sim.3095).
    """
    share, middle, limits = (np.asarray(values, dtype=float) for values in (weights, means, intervals))
    centre = float(share @ middle)
    below, above = (math.hypot(*(share * gap)) for gap in (middle - limits[:, 0], limits[:, 1] - middle))
    return centre - below, centre + above  # Inside of the average of the limits, so that shares stay in [0, 1].


def ratio_interval(sums: Sequence[ArrayLike], counts: Sequence[ArrayLike]) -> Interval:
    r"""The interval of a mean over responses whose number differs from problem to problem, such as a mean length.

    With a problem's sum :math:`y`, not negative, over its :math:`x` responses (``[N_d]`` for each dataset) the mean is
    :math:`R = \sum y / \sum x`. Its variance is the jackknife's, which leaves out one problem after the other:

    .. math:: u = \frac{y - R x}{1 - x / X_d}, \quad
        v = \sum_d \frac{N_d - 1}{N_d} \sum_{i \in d} (u_i - \bar u_d)^2 \Big/ \Bigl(\sum_d X_d\Bigr)^2, \quad
        R \pm t \sqrt v

    with the responses :math:`X_d` of a dataset. The degrees of freedom are those of the problems that have such a
    response. If a dataset has only one of them, or none has any, the limits are NaN.

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
    half = _t_quantile(sum(having) - len(having)) * math.sqrt(variance)
    return max(0.0, mean - half), mean + half


# --- methods with several seeds ---------------------------------------------------------------------------------------


def seed_spread(tables: Sequence[Floats], weights: Sequence[float]) -> SeedSpread | None:
    r"""How an average over datasets of shares (or their differences) ``[N_d, S]`` varies with the seeds; None for one.

    The seeds' averages :math:`m_s` give :math:`V_s = \operatorname{Var}(m_s) / S`. It contains what sampling and the
    problems' own reactions to a seed cause, :math:`V_e = \sum_d w_d^2 \, \text{MS}_{e,d} / (N_d S)` with the residual
    mean square of problems × seeds. The excess is :math:`\max(V_s - V_e, 0)`.
    """
    seeds = tables[0].shape[1]
    if seeds < 2:
        return None
    averages = sum(weight * table.mean(0) for weight, table in zip(weights, tables, strict=True))
    variance = float(np.var(averages, ddof=1)) / seeds
    variance *= variance > 1e-13  # Event files hold float32: equal differences differ by its rounding.
    noise = 0.0
    for weight, table in zip(weights, tables, strict=True):
        if len(table) > 1:
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            noise += weight**2 * float((rest**2).sum()) / ((len(table) - 1) * (seeds - 1)) / table.size
    return SeedSpread(variance=variance, excess=max(variance - noise, 0.0), df=seeds - 1)


def estimate(parts: Sequence[Share], weights: Sequence[float]) -> Estimate:
    r"""A figure of one method, averaged over datasets; `parts` has the shares and noise ``[N_d, S]`` of each of them.

    The problems alone give an interval (`mean_interval` of the means over seeds, `average_interval`). With several
    seeds its half widths :math:`h` become

    .. math:: \max\Bigl(\sqrt{h^2 + t_{N-1}^2 \cdot \text{excess}}, \; t_{S-1} \sqrt{V_s}\Bigr)

    that is, at least those of Student's interval over the seeds' averages (`seed_spread`).
    """
    means = [float(values.mean()) for values, _ in parts]
    intervals = [mean_interval(values.mean(1), noise.mean(1) / values.shape[1]) for values, noise in parts]
    value, seeds = float(np.dot(weights, means)), seed_spread([values for values, _ in parts], weights)
    df = max(sum(len(values) - 1 for values, _ in parts), 1)
    low, high = _with_seeds(value, average_interval(means, intervals, weights), df, seeds)
    return Estimate(value=value, low=max(0.0, low), high=min(1.0, high))


def difference(
    ours: Sequence[Share], theirs: Sequence[Share], weights: Sequence[float], paired_seeds: bool
) -> Difference:
    r"""The figure of one method less that of a baseline on the same problems, averaged over datasets.

    Problems are always paired. The interval is that of `estimate`, with `difference_interval` for the problems. Seeds
    are paired, or the variances of both methods are added (with Welch's degrees of freedom). If a method has only one
    seed, the result is about these runs and says nothing about other seeds.

    The p-value is that of the exact sign-flip test (`sign_flip_p`) where few problems differ; else it is the level at
    which the interval would end at 0. With several seeds it is the largest one of the tests over problems, over
    problems and seeds, and over seeds alone.

    `ours` are ``[N_d, S]`` and `theirs` ``[N_d, S']`` for each dataset, in the same order of problems. `paired_seeds`
    says whether the columns of both belong to the same seeds.
    """
    rows, noises = [], []
    for (a, noise_a), (b, noise_b) in zip(ours, theirs, strict=True):
        rows.append(a.mean(1) - b.mean(1))
        noises.append(noise_a.mean(1) / a.shape[1] + noise_b.mean(1) / b.shape[1])
    means = [float(d.mean()) for d in rows]
    intervals = [difference_interval(d, noise) for d, noise in zip(rows, noises, strict=True)]
    value, df = float(np.dot(weights, means)), float(max(sum(len(d) - 1 for d in rows), 1))
    low, high = average_interval(means, intervals, weights)
    towards_0 = (value - low if value > 0 else high - value) / _t_quantile(df)
    exact = sign_flip_p(np.concatenate([weight / len(d) * d for weight, d in zip(weights, rows, strict=True)]))
    tests = [_tail(value, towards_0, df) if exact is None else exact]
    errors = [((high - low) / 2 / _t_quantile(df), df)]
    seeds = _both_spreads([a for a, _ in ours], [b for b, _ in theirs], weights, paired_seeds)
    if seeds is not None:
        excess, error = math.sqrt(seeds.excess), math.sqrt(seeds.variance)
        tests += [_tail(value, math.hypot(towards_0, excess), df), _tail(value, error, seeds.df)]
        errors = [(math.hypot(errors[0][0], excess), df), (error, seeds.df)]
    low, high = _with_seeds(value, (low, high), df, seeds)
    return Difference(value=value, low=max(-1.0, low), high=min(1.0, high), p_value=max(tests), errors=tuple(errors))


def seeds_estimate(values: Sequence[float]) -> Estimate:
    """A mean over seeds with Student's interval; the limits are NaN for one seed, and if all seeds are alike."""
    table = np.asarray(values, dtype=float)[None]
    mean, half = float(table.mean()), _half_width(seed_spread([table], [1.0]))
    return Estimate(value=mean, low=max(mean - half, 0.0), high=min(mean + half, 1.0))


def seeds_difference(ours: Sequence[float], theirs: Sequence[float], paired: bool) -> Difference | None:
    """The difference of two methods' means over seeds, with Student's or Welch's interval and test; None for one seed.

    It is about other seeds on the same problems. Where the seeds' differences are all the same, nothing is known of
    their spread: the limits are NaN, and the p-value is that of the sign-flip test.
    """
    a, b = (np.asarray(values, dtype=float)[None] for values in (ours, theirs))
    spread = _both_spreads([a], [b], [1.0], paired)
    if spread is None:
        return None
    value, half, error = float(a.mean() - b.mean()), _half_width(spread), math.sqrt(spread.variance)
    exact = (sign_flip_p((a - b)[0]) if paired else math.nan) if not error else None
    p_value = _tail(value, error, spread.df) if exact is None else exact
    low, high = max(value - half, -1.0), min(value + half, 1.0)
    return Difference(value=value, low=low, high=high, p_value=p_value, errors=((error, spread.df),))


def _both_spreads(
    ours: Sequence[Floats], theirs: Sequence[Floats], weights: Sequence[float], paired: bool
) -> SeedSpread | None:
    """The spread of a difference: of its seeds' differences, or the sum of both methods' (Welch)."""
    if paired:
        return seed_spread([a - b for a, b in zip(ours, theirs, strict=True)], weights)
    first, second = seed_spread(ours, weights), seed_spread(theirs, weights)
    if first is None or second is None:
        return None
    total = first.variance + second.variance
    parts = first.variance**2 / first.df + second.variance**2 / second.df
    df = total**2 / parts if parts else min(first.df, second.df)
    return SeedSpread(variance=total, excess=first.excess + second.excess, df=df)


def _with_seeds(value: float, problems: Interval, df: float, seeds: SeedSpread | None) -> Interval:
    """The interval over problems, widened by the spread over seeds."""
    below, above = value - problems[0], problems[1] - value
    if seeds is not None:
        least, excess = _t_quantile(seeds.df) * math.sqrt(seeds.variance), _t_quantile(df) * math.sqrt(seeds.excess)
        below, above = (max(math.hypot(gap, excess), least) for gap in (below, above))
    return value - below, value + above


def _half_width(spread: SeedSpread | None) -> float:
    """Of Student's interval over seeds; NaN, which `max` and `min` return if it comes first, if all are alike."""
    return _t_quantile(spread.df) * math.sqrt(spread.variance) if spread and spread.variance else math.nan


# --- tests ------------------------------------------------------------------------------------------------------------


def sign_flip_p(differences: ArrayLike) -> float | None:
    """The exact two-sided p-value of the sign-flip test; None where too many problems differ to enumerate their signs.

    The p-value is the share of all signs of the differences with a sum at least as far from 0 as the observed one. For
    binary outcomes it is McNemar's exact test.

    >>> sign_flip_p([0.5, 0.5, 0.0, 0.5])  # 2 of 2³ signs
    0.25
    """
    values = np.asarray(differences, dtype=float)
    values = values[values != 0]
    if len(values) > _MOST_ENUMERATED:
        return None
    # SciPy's `permutation_test` gives the same p-value, but takes 15 seconds for a million signs.
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


def _tail(value: float, error: float, df: float) -> float:
    """The two-sided p-value of Student's test."""
    if not value:
        return 1.0
    return float(2 * stdtr(df, -abs(value) / error)) if error else 0.0


def _t_quantile(df: float, level: float = _UPPER) -> float:
    """The quantile of Student's distribution."""
    return float(stdtrit(df, level))

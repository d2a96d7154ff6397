r"""Figures and paired differences of methods with several datasets and seeds.

Shapes: ``N`` problems of a dataset, ``S`` seeds (runs of one method). Shares and noise are those of `statistics`. The
seeds of a method are a random sample of its possible trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtrinc, stdtr

from grail_lightning.evaluate.statistics import (
    UPPER,
    Floats,
    average_interval,
    difference_interval,
    mean_interval,
    sign_flip_p,
    t_quantile,
)

POWER = 0.8


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """How much the mean over seeds varies with the seeds."""

    # The variance of the mean over seeds, estimated from the spread of the seeds' means.
    variance: float
    # The part of it that the seeds themselves cause: without what sampling would cause alone; at least 0.
    excess: float
    # Its degrees of freedom.
    df: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with the limits of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """A paired difference with its 95 % interval and its test."""

    # Two-sided, of the hypothesis that there is no difference; not corrected.
    p_value: float
    # The standard error that the problems cause, and its degrees of freedom.
    problems_error: float
    problems_df: float
    # None if a method has only one seed.
    seeds: SeedSpread | None = None

    def detectable(self, comparisons: int = 1) -> float:
        """The smallest true difference that a repetition would find with a probability of 80 %.

        It is as many standard errors as the noncentrality at which Student's test of the level ``0.05 / comparisons``
        has that power. With seeds it is the larger one of the two tests of `difference`.
        """
        level = 1 - (1 - UPPER) / max(comparisons, 1)

        def least(variance: float, df: float) -> float:
            return float(nctdtrinc(df, 1 - POWER, t_quantile(df, level))) * math.sqrt(variance)

        if self.seeds is None:
            return least(self.problems_error**2, self.problems_df)
        both = least(self.problems_error**2 + self.seeds.excess, self.problems_df)
        return max(both, least(self.seeds.variance, self.seeds.df))


def seed_spread(tables: Sequence[Floats], weights: Sequence[float]) -> SeedSpread | None:
    r"""How an average over datasets varies with the seeds; None for one seed.

    The seeds' averages :math:`m_s` give :math:`V_s = \operatorname{Var}(m_s) / S`. It contains what sampling and the
    problems' own reactions to a seed cause, :math:`V_e = \sum_d w_d^2 \, \text{MS}_{e,d} / (N_d S)` with the residual
    mean square of problems × seeds. The excess is :math:`\max(V_s - V_e, 0)`.

    Args:
        tables: ``[N_d, S]`` for each dataset: the share of each problem for each seed (or the difference of shares).
        weights: The weight of each dataset.
    """
    seeds = tables[0].shape[1]
    if seeds < 2:
        return None
    averages = sum(weight * table.mean(0) for weight, table in zip(weights, tables, strict=True))
    variance = float(np.var(averages, ddof=1)) / seeds
    noise = 0.0
    for weight, table in zip(weights, tables, strict=True):
        if len(table) > 1:
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            noise += weight**2 * float((rest**2).sum()) / ((len(table) - 1) * (seeds - 1)) / table.size
    return SeedSpread(variance=variance, excess=max(variance - noise, 0.0), df=seeds - 1)


def estimate(tables: Sequence[Floats], noises: Sequence[Floats], weights: Sequence[float]) -> Estimate:
    r"""A figure of one method, averaged over datasets, with its 95 % interval.

    The problems alone give an interval (`mean_interval` of the means over seeds, `average_interval`). With several
    seeds its half widths :math:`h` become

    .. math:: \max\Bigl(\sqrt{h^2 + t_{N-1}^2 \cdot \text{excess}}, \; t_{S-1} \sqrt{V_s}\Bigr)

    that is, at least those of Student's interval over the seeds' averages (`seed_spread`).

    Args:
        tables: ``[N_d, S]`` for each dataset: the share of each problem for each seed.
        noises: ``[N_d, S]`` for each dataset: the variance of each share over other samples of the same problem.
        weights: The weight of each dataset, with the sum 1.
    """
    means = [float(table.mean()) for table in tables]
    parts = [mean_interval(t.mean(1), n.mean(1) / t.shape[1]) for t, n in zip(tables, noises, strict=True)]
    low, high = average_interval(means, parts, weights)
    value = float(np.dot(weights, means))
    quantile = t_quantile(max(sum(map(len, tables)) - len(tables), 1))
    below, above = _widened((value - low, high - value), seed_spread(tables, weights), quantile)
    return Estimate(value=value, low=max(0.0, value - below), high=min(1.0, value + above))


def difference(
    ours: Sequence[Floats],
    theirs: Sequence[Floats],
    noises: Sequence[tuple[Floats, Floats]],
    weights: Sequence[float],
    paired_seeds: bool,
) -> Difference:
    r"""The figure of one method less that of a baseline on the same problems, averaged over datasets.

    Problems are always paired. The interval is that of `estimate`, with `difference_interval` for the problems. Seeds
    are paired, or the variances of both methods are added (with Welch's degrees of freedom). If a method has only one
    seed, the result is about these runs and says nothing about other seeds.

    The p-value is that of the exact sign-flip test (`sign_flip_p`) where few problems differ; else it is the level at
    which the interval would end at 0. With several seeds it is the largest one of the tests over problems, over
    problems and seeds, and over seeds alone.

    Args:
        ours: ``[N_d, S]`` for each dataset, of the method.
        theirs: ``[N_d, S']``, of the baseline, in the same order of problems.
        noises: The variances of both methods' shares, as in `estimate`.
        weights: The weight of each dataset, with the sum 1.
        paired_seeds: Whether the columns of both methods belong to the same seeds.
    """
    rows = [a.mean(1) - b.mean(1) for a, b in zip(ours, theirs, strict=True)]
    noise = [a.mean(1) / a.shape[1] + b.mean(1) / b.shape[1] for a, b in noises]
    means = [float(d.mean()) for d in rows]
    parts = [difference_interval(d, n) for d, n in zip(rows, noise, strict=True)]
    value = float(np.dot(weights, means))
    low, high = average_interval(means, parts, weights, least=-1.0)
    df = max(sum(map(len, rows)) - len(rows), 1)
    quantile = t_quantile(df)
    seeds = _both_spreads(ours, theirs, weights, paired_seeds)
    error = (value - low if value > 0 else high - value) / quantile  # Of the side towards 0.
    exact = sign_flip_p(np.concatenate([weight / len(d) * d for weight, d in zip(weights, rows, strict=True)]))
    tests = [_tail(value, error, df) if exact is None else exact]
    if seeds is not None:
        tests.append(_tail(value, math.hypot(error, math.sqrt(seeds.excess)), df))
        tests.append(_tail(value, math.sqrt(seeds.variance), seeds.df))
    below, above = _widened((value - low, high - value), seeds, quantile)
    return Difference(
        value=value,
        low=max(-1.0, value - below),
        high=min(1.0, value + above),
        p_value=max(tests),
        problems_error=(high - low) / 2 / quantile,
        problems_df=df,
        seeds=seeds,
    )


def seeds_estimate(values: Sequence[float]) -> Estimate:
    """A mean over seeds with Student's 95 % interval; the limits are NaN for one seed, and if all seeds are alike."""
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
    value, half = float(a.mean() - b.mean()), _half_width(spread)
    exact = sign_flip_p((a - b)[0]) if paired and not spread.variance else None
    return Difference(
        value=value,
        low=max(value - half, -1.0),
        high=min(value + half, 1.0),
        p_value=_tail(value, math.sqrt(spread.variance), spread.df) if exact is None else exact,
        problems_error=0.0,
        problems_df=spread.df,
        seeds=spread,
    )


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


def _widened(gaps: tuple[float, float], seeds: SeedSpread | None, quantile: float) -> tuple[float, float]:
    """Half widths that count the seeds, too."""
    if seeds is None:
        return gaps
    least = t_quantile(seeds.df) * math.sqrt(seeds.variance)
    below, above = (max(math.hypot(gap, quantile * math.sqrt(seeds.excess)), least) for gap in gaps)
    return below, above


def _tail(value: float, error: float, df: float) -> float:
    """The two-sided p-value of Student's test."""
    if not value:
        return 1.0
    return float(2 * stdtr(df, -abs(value) / error)) if error else 0.0


def _half_width(spread: SeedSpread | None) -> float:
    """Of Student's interval over seeds; NaN, which `max` and `min` return if it comes first, if all are alike."""
    return t_quantile(spread.df) * math.sqrt(spread.variance) if spread and spread.variance else math.nan

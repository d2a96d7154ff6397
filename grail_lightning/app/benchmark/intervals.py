r"""Estimates over the rollouts of many prompts, with 95 % intervals. Rollouts of one prompt are not independent.

An estimate is ``p = Σ_g t_g / Σ_g c_g`` over prompts ``g``: what their rollouts add up to, and of how many. Its
variance is that of a ratio of sums over clusters,

.. math:: v = \frac{G}{G - 1} \frac{\sum_g (t_g - p\,c_g)^2}{(\sum_g c_g)^2}

with ``G`` prompts that count. Degrees of freedom are one less than Kish's effective number of prompts,
``(Σ_g c_g)^2 / Σ_g c_g^2``. The percentile interval of a bootstrap over prompts would be too short with few prompts,
and of no width where all of them agree, as AUROCs of good methods do. So an estimate that lies between 0 and 1 gets the
interval of Korn and Graubard (1998), that of Clopper and Pearson for ``n* = p(1-p)/v`` independent cases, corrected by
quantiles of Student's t; others get Student's interval.

Source: E. L. Korn, B. I. Graubard, "Confidence intervals for proportions with small expected number of positive counts
estimated from survey data", Survey Methodology 24 (1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, t

Array = NDArray[np.float64]
Interval = list[float]
"""The estimate and the two ends of its 95 % interval."""
_TAIL = 0.025


@dataclass(frozen=True)
class Sums:
    """What the rollouts of each prompt add up to, and of how many: ``[G]`` each."""

    totals: Array
    counts: Array

    @classmethod
    def of_rows(cls, values: NDArray[Any], group_size: int) -> Sums:
        """Sums over the rows of each prompt that have a value; ``[R]`` with NaN for the others."""
        groups = np.asarray(values, dtype=np.float64).reshape(-1, group_size)
        return cls(np.nansum(groups, 1), (~np.isnan(groups)).sum(1).astype(np.float64))

    @property
    def number(self) -> float:
        """Kish's effective number of prompts, at least 2."""
        squares = float((self.counts**2).sum())
        return max(float(self.counts.sum()) ** 2 / squares, 2.0) if squares else 2.0

    @property
    def estimate(self) -> float:
        """``p``; NaN where nothing counts."""
        count = float(self.counts.sum())
        return float(self.totals.sum()) / count if count else math.nan


def share(sums: Sums) -> Interval | None:
    """An estimate between 0 and 1 with its interval; None where fewer than two prompts count."""
    number, p = int((sums.counts > 0).sum()), sums.estimate
    if number < 2 or math.isnan(p):
        return None
    variance, effective = _variance(sums, number), sums.number
    if variance > 0 and 0 < p < 1:
        # As if one more prompt were at one half: few prompts near 1 may by chance all agree more than others would.
        cases = p * (1 - p) / (variance + ((p - 0.5) / effective) ** 2)
        # Quantiles of t for as many cases and for as many prompts.
        cases *= (float(t.ppf(_TAIL, max(cases - 1, 1))) / float(t.ppf(_TAIL, effective - 1))) ** 2
    else:
        cases = effective
    hits = p * cases
    low = float(beta.ppf(_TAIL, hits, cases - hits + 1)) if hits > 0 else 0.0
    high = float(beta.ppf(1 - _TAIL, hits + 1, cases - hits)) if hits < cases else 1.0
    return [p, min(low, p), max(high, p)]


def mean(sums: Sums) -> Interval | None:
    """Any other estimate with its interval; None where fewer than two prompts count."""
    number, p = int((sums.counts > 0).sum()), sums.estimate
    if number < 2 or math.isnan(p):
        return None
    half = float(t.ppf(1 - _TAIL, sums.number - 1)) * math.sqrt(_variance(sums, number))
    return [p, p - half, p + half]


def _variance(sums: Sums, number: int) -> float:
    left = sums.totals - sums.estimate * sums.counts
    return number / (number - 1) * float((left**2).sum()) / float(sums.counts.sum()) ** 2

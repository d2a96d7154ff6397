"""Intervals over prompts: by hand, and their coverage in simulations with clustered rollouts."""

import math

import numpy as np
import pytest
from scipy.stats import beta, norm, t

from grail_lightning.app.benchmark.intervals import Sums, mean, share

GROUP = 8


def test_an_estimate_is_a_ratio_of_sums_and_rows_without_a_value_do_not_count():
    sums = Sums.of_rows(np.array([1.0, math.nan, 0.0, 0.5]), 2)
    assert sums.totals.tolist() == [1.0, 0.5]
    assert sums.counts.tolist() == [1.0, 2.0]
    assert sums.estimate == 0.5


def test_students_interval_of_two_prompts_by_hand():
    # The estimate is 3/2; residuals are -0.5 and 0.5; v = 2/1 · (0.25 + 0.25) / 4 = 0.25.
    estimate, low, high = mean(Sums(np.array([1.0, 2.0]), np.array([1.0, 1.0])))
    half = t.ppf(0.975, 1) * 0.5
    assert (estimate, low, high) == (1.5, pytest.approx(1.5 - half), pytest.approx(1.5 + half))


def test_where_all_prompts_agree_the_interval_is_that_of_as_many_cases():
    estimate, low, high = share(Sums(np.full(20, 3.0), np.full(20, 3.0)))
    assert (estimate, high) == (1.0, 1.0)
    assert low == pytest.approx(beta.ppf(0.025, 20, 1))  # 0.83
    assert share(Sums(np.zeros(20), np.ones(20)))[2] == pytest.approx(1 - low)


def test_nothing_is_said_of_fewer_than_two_prompts():
    assert share(Sums(np.array([1.0, 0.0]), np.array([1.0, 0.0]))) is None
    assert mean(Sums(np.zeros(3), np.zeros(3))) is None


def shares_of_prompts(rng, prompts, centre, spread, draws):
    """Simulated AUROCs of rollouts ``[D, G·8]``, alike within a prompt; of two to four fifths none is measured."""
    level = norm.ppf(centre) * math.sqrt(1 + spread**2) + spread * rng.standard_normal((draws, prompts, 1))
    chance = norm.cdf(level)
    pairs = rng.integers(1, 5, size=(draws, prompts, GROUP))
    values = rng.binomial(pairs, np.broadcast_to(chance, pairs.shape)) / pairs
    kept = rng.random((draws, prompts, 1)) * 0.4 + 0.2
    values[rng.random(values.shape) > kept] = math.nan
    return values.reshape(draws, -1)


def coverage(interval, tables, truth):
    """The share of intervals that hold the truth, and their mean width."""
    found = [interval(Sums.of_rows(table, GROUP)) for table in tables]
    inside = [low <= truth <= high for _, low, high in found]
    return sum(inside) / len(inside), sum(high - low for _, low, high in found) / len(found)


def bootstrap(sums):
    """The percentile interval of a bootstrap over prompts, for comparison."""
    number = len(sums.counts)
    draws = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), size=400)
    low, high = np.nanquantile((draws @ sums.totals) / np.maximum(draws @ sums.counts, 1e-9), [0.025, 0.975])
    return sums.estimate, low, high


CASES = [(20, 0.95, 1.0), (20, 0.5, 0.5), (20, 0.9, 0.8), (20, 0.99, 0.5)]
CASES += [(100, 0.5, 1.0), (100, 0.95, 1.0), (500, 0.99, 1.0)]


def test_intervals_near_one_of_few_prompts_hold_the_truth_where_the_bootstrap_does_not():
    tables = shares_of_prompts(np.random.default_rng(1), 20, 0.99, 0.5, 300)
    assert coverage(share, tables, 0.99)[0] >= 0.92
    assert coverage(bootstrap, tables, 0.99)[0] < 0.85


def test_students_intervals_of_few_prompts_hold_the_truth():
    rng = np.random.default_rng(2)
    rows = np.exp(rng.standard_normal((400, 20, 1)) * 0.5 + rng.standard_normal((400, 20, GROUP)) * 0.5)
    assert coverage(mean, rows.reshape(400, -1), math.exp(0.25))[0] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "centre", "spread"), CASES)
def test_intervals_of_shares_cover_at_least_92_percent(prompts, centre, spread):
    tables = shares_of_prompts(np.random.default_rng(3), prompts, centre, spread, 3000)
    assert coverage(share, tables, centre)[0] >= 0.92

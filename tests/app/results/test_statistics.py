"""Intervals and tests beside SciPy's, known closed forms, and simulations."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from grail_lightning.app.results.statistics import (
    average_interval,
    difference,
    difference_interval,
    estimate,
    holm,
    mean_interval,
    ratio_interval,
    seed_spread,
    seeds_difference,
    sign_flip_p,
)
from grail_lightning.functional import pass_at_k, pass_at_k_variance

RNG = np.random.default_rng


def _interval(correct, k=1):
    """The interval of pass@k of `[N, n]` right and wrong samples."""
    n, c = correct.shape[1], torch.as_tensor(correct).sum(1)
    return mean_interval(pass_at_k(n, c, k), pass_at_k_variance(n, c, k))


def _wilson(p, n):
    """Wilson's interval of a share `p` of `n` samples, which need not be whole numbers."""
    z = scipy.stats.norm.ppf(0.975)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    middle = p + z**2 / (2 * n)
    return max(0, (middle - half) / (1 + z**2 / n)), min(1, (middle + half) / (1 + z**2 / n))


# The interval of one run.


@pytest.mark.parametrize(
    ("number", "samples", "rate", "spread"),
    [(30, 1, 0.1, "none"), (30, 3, 0.5, "even"), (200, 3, 0.9, "none"), (500, 3, 0.1, "all or nothing")],
)
def test_the_interval_covers_the_truth(number, samples, rate, spread):
    """Difficulties are the same, evenly drawn, or all or nothing; the benchmark measures all pairs, more closely."""
    draw, covered = RNG(0), 0
    for _ in range(300):
        chances = rate + (min(rate, 1 - rate) if spread == "even" else 0) * (2 * draw.random((number, 1)) - 1)
        if spread == "all or nothing":
            chances = (draw.random((number, 1)) < rate).astype(float)
        low, high = _interval(draw.random((number, samples)) < chances)
        covered += low <= rate <= high
    assert covered / 300 >= 0.912, "three standard errors of 300 repetitions below 0.95"


def test_where_each_problem_is_a_yes_or_a_no_the_interval_is_wilsons():
    known = scipy.stats.binomtest(10, 40).proportion_ci(method="wilson")
    assert (known.low, known.high) == pytest.approx(_wilson(0.25, 40))
    for shares, p, n in (([1, 0, 0, 0] * 10, 0.25, 40), ([1], 1, 1), ([0] * 30, 0, 30)):
        assert mean_interval(shares, np.zeros(len(shares))) == pytest.approx(_wilson(p, n), abs=1e-9)
    assert all(math.isnan(limit) for limit in (*mean_interval([], []), *difference_interval([], [])))


@pytest.mark.parametrize("noise", [0.0, 0.18, 0.9])
def test_the_interval_of_shares_is_wilsons_of_the_effective_number_of_problems(noise):
    shares = RNG(0).integers(0, 4, 12) / 3
    mean, variance = shares.mean(), max(shares.var(ddof=1), noise)  # Other samples may vary more than these do.
    quantiles = scipy.stats.norm.ppf(0.975) / scipy.stats.t.ppf(0.975, 11)
    effective = max(12, 12 * mean * (1 - mean) / variance * quantiles**2)
    assert mean_interval(shares, np.full(12, noise)) == pytest.approx(_wilson(mean, effective))
    assert (effective == 12) == (noise == 0.9)


def test_the_interval_of_an_average_adds_weighted_half_widths_in_quadrature():
    low, high = average_interval([0.4, 0.6], [(0.1, 0.43), (0.2, 0.64)], [0.75, 0.25])
    assert low == pytest.approx(0.45 - math.hypot(0.75 * 0.3, 0.25 * 0.4))
    assert high == pytest.approx(0.45 + math.hypot(0.75 * 0.03, 0.25 * 0.04))


# The interval of a difference of two runs.


@pytest.mark.parametrize("better", [0, 3, 30])
def test_for_yes_and_no_the_interval_of_a_difference_is_bonett_and_prices(better):
    n, worse = 40, 2
    d = np.array([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))
    # Bonett and Price (2012): one is added to both counts of problems that differ.
    p12, p21 = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = scipy.stats.t.ppf(0.975, n - 1) * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    assert difference_interval(d, np.zeros(n)) == pytest.approx((p12 - p21 - half, p12 - p21 + half))


def test_problems_that_differ_alike_or_not_at_all_are_not_certainty():
    low, high = difference_interval(np.zeros(30), np.zeros(30))
    assert -high == low
    assert 0.05 < high < 0.1, "of 30 problems none differs: at most 3/30 do, by the rule of three"
    # With the weight f = 2/3 of a pseudo-problem, since d² is 2/3 of |d|; without noise the variance is theirs.
    low, high = difference_interval(np.full(30, 2 / 3), np.zeros(30))
    mean, variance = 20 / (30 + 4 / 3), (30 * 4 / 9 + 4 / 3) / (30 + 4 / 3)
    half = scipy.stats.t.ppf(0.975, 29) * math.sqrt((variance - mean**2) / (30 + 4 / 3))
    assert (low, high) == pytest.approx((mean - half, mean + half))
    # With more noise than differences the pseudo-problems weigh 1 each, and the noise is the variance.
    half = scipy.stats.t.ppf(0.975, 29) * math.sqrt(0.2 / 32)
    assert difference_interval(np.full(30, 0.01), np.full(30, 0.2)) == pytest.approx((0.3 / 32 - half, 0.3 / 32 + half))


@pytest.mark.parametrize("number", [2, 9])
def test_signs_are_enumerated_as_scipy_does(number):
    draw = RNG(number)
    for _ in range(20):
        d = draw.choice([-1.0, -2 / 3, -1 / 3, 0.1, 1 / 3, 2 / 3], number)
        known = scipy.stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
        # scipy doubles the smaller tail, which is the same: the distribution is symmetric.
        assert sign_flip_p(np.append(d, [0.0, 0.0])) == pytest.approx(known)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (7, 3), (20, 0), (21, 0)])
def test_for_yes_and_no_the_sign_flip_test_is_mcnemars_of_up_to_twenty_problems(better, worse):
    known = scipy.stats.binomtest(better, better + worse, 0.5).pvalue if better + worse else 1.0
    found = sign_flip_p([1.0] * better + [-1.0] * worse + [0.0] * 1000)
    assert found == (None if better > 20 else pytest.approx(known))


def test_holm_is_the_closed_test_of_bonferronis_and_leaves_out_what_was_not_tested():
    """The corrected p-value of a hypothesis is the largest Bonferroni p-value of the sets that contain it."""
    draw = RNG(0)
    for number in range(7):
        p = list(draw.random(number) ** 3)
        sets = [s for size in range(1, number + 1) for s in itertools.combinations(range(number), size)]
        closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(number)]
        assert holm(p) == pytest.approx(closed)
        assert holm([math.nan, *p, math.nan]) == pytest.approx([math.nan, *closed, math.nan], nan_ok=True)


# Several seeds and datasets.


def _shares(problems, seeds, rate=0.5, of_seeds=0.0, seed=0):
    """The shares of four samples and their noise, ``[N, S]`` each."""
    draw = RNG(seed)
    chance = rate + 0.2 * draw.uniform(-1, 1, (problems, 1)) + of_seeds * draw.standard_normal((1, seeds))
    shares = draw.binomial(4, chance.clip(0, 1)) / 4
    return shares, shares * (1 - shares) / 4


def _compared(ours, theirs, paired=True):
    return difference([(ours, np.zeros_like(ours))], [(theirs, np.zeros_like(theirs))], [1.0], paired)


def test_one_seed_has_the_interval_of_its_problems_and_of_the_average_of_its_datasets():
    parts = [_shares(40, 1, 0.2, seed=1), _shares(200, 1, 0.7, seed=2)]
    means, known = [t.mean() for t, _ in parts], [mean_interval(t[:, 0], n[:, 0]) for t, n in parts]
    alone = estimate(parts[:1], [1.0])
    assert (alone.value, alone.low, alone.high) == pytest.approx((means[0], *known[0]))
    both = estimate(parts, [40 / 240, 200 / 240])
    assert both.value == pytest.approx(np.concatenate([t for t, _ in parts]).mean())
    assert (both.low, both.high) == pytest.approx(average_interval(means, known, [40 / 240, 200 / 240]))


@pytest.mark.parametrize("seeds", [2, 4])
def test_seeds_that_differ_widely_have_students_interval_over_seeds(seeds):
    shares, noise = _shares(400, seeds, of_seeds=0.08)
    known = scipy.stats.ttest_1samp(shares.mean(0), 0).confidence_interval()
    # The problems' part is added, so it is not narrower; here the seeds' part is the larger one.
    found = estimate([(shares, noise)], [1.0])
    assert (found.low, found.high) == pytest.approx((max(0.0, known.low), min(1.0, known.high)), abs=1e-9)


def test_the_excess_of_seeds_is_their_variance_component():
    """Var(mean) of a crossed design: the seeds' part is estimated without bias before it is cut off at 0."""
    apart, alike = (
        [seed_spread([_shares(200, 8, of_seeds=of_seeds, seed=seed)[0]], [1.0]) for seed in range(200)]
        for of_seeds in (0.05, 0.0)
    )
    assert np.mean([spread.excess for spread in apart]) == pytest.approx(0.05**2 / 8, rel=0.1)
    assert np.mean([spread.excess for spread in alike]) < 0.1 * 0.05**2 / 8
    # What sampling causes alone stays in the variance: p(1 - p)/4 samples of 200 problems and 8 seeds.
    p = 0.5 + np.linspace(-0.2, 0.2, 1001)
    assert np.mean([s.variance for s in alike]) == pytest.approx((p * (1 - p)).mean() / 4 / 200 / 8, rel=0.1)


def test_seeds_that_are_good_on_all_datasets_are_not_averaged_out():
    """Two datasets whose figures rise and fall together with the seed, and two with opposite ones."""
    up = np.full((100, 1), 0.5) + np.array([[-0.1, 0.0, 0.1]])
    together, opposite = (seed_spread([up, other], [0.5, 0.5]) for other in (up, 1 - up))
    assert together.variance == pytest.approx(0.1**2 / 3)
    assert opposite.variance == pytest.approx(0.0, abs=1e-12)


def test_the_difference_of_two_runs_pairs_their_problems():
    theirs = (RNG(0).random((200, 1)) < 0.5).astype(float)
    ours = theirs.copy()
    ours[:30] = 1.0
    found, d = _compared(ours, theirs), (ours - theirs)[:, 0]
    assert (found.value, found.low, found.high) == pytest.approx((d.mean(), *difference_interval(d, np.zeros(200))))
    assert found.p_value == pytest.approx(2 / 2 ** int(d.sum())), "only problems that differ count, exactly"
    same = _compared(theirs, theirs)
    assert (same.value, same.p_value) == (0.0, 1.0)
    assert same.low < 0 < same.high


def test_where_many_problems_differ_the_p_value_is_below_the_level_if_the_interval_leaves_0_out():
    seen = set()
    for seed in range(60):
        ours, theirs = (_shares(120, 1, rate, seed=seed * 2 + k)[0] for k, rate in enumerate((0.56, 0.5)))
        found = _compared(ours, theirs)
        out = not found.low <= 0 <= found.high
        assert out == (found.p_value < 0.05)
        seen.add(out)
        plain = scipy.stats.ttest_1samp((ours - theirs)[:, 0], 0).pvalue
        assert found.p_value == pytest.approx(plain, rel=0.25) or plain < 0.01  # The tails are where they differ.
    assert seen == {True, False}


@pytest.mark.parametrize("paired", [True, False])
def test_seeds_that_differ_widely_have_students_test_over_seeds(paired):
    ours, _ = _shares(300, 4, 0.6, of_seeds=0.06, seed=1)
    theirs, _ = _shares(300, 4 if paired else 3, 0.5, of_seeds=0.06, seed=2)
    found = _compared(ours, theirs, paired=paired)
    a, b = ours.mean(0), theirs.mean(0)
    known = scipy.stats.ttest_rel(a, b) if paired else scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found.p_value == pytest.approx(known.pvalue, rel=0.05)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()), abs=0.005)
    assert found.errors[-1][1] == pytest.approx(known.df)


def test_one_seed_of_a_method_says_nothing_about_others():
    ours, theirs = _shares(100, 1, seed=1)[0], _shares(100, 3, of_seeds=0.2, seed=2)[0]
    found = _compared(ours, theirs, paired=False)
    assert len(found.errors) == 1, "that of the problems"
    known = difference_interval(ours[:, 0] - theirs.mean(1), np.zeros(100))
    assert (found.low, found.high) == pytest.approx(known)


@pytest.mark.parametrize(("seeds", "comparisons"), [(1, 7), (5, 1)])
def test_a_detectable_difference_gives_students_test_a_power_of_80_percent(seeds, comparisons):
    ours, theirs = (_shares(300, seeds, of_seeds=0.06, seed=k)[0] for k in (1, 2))
    found = _compared(ours, theirs)
    d = (ours - theirs).mean(0 if seeds > 1 else 1)
    error = scipy.stats.sem(d) if seeds > 1 else (found.high - found.low) / 2 / scipy.stats.t.ppf(0.975, 299)
    assert error == pytest.approx(scipy.stats.sem(d), rel=0.05)
    limit = scipy.stats.t.ppf(1 - 0.025 / comparisons, len(d) - 1)
    power = scipy.stats.nct.sf(limit, len(d) - 1, found.detectable(comparisons) / error)
    assert power == pytest.approx(0.8, abs=1e-4)


def test_differences_that_are_equal_but_for_the_rounding_of_event_files_have_no_spread():
    theirs = [250 / 500, 300 / 500, 219 / 500]
    ours, theirs = (
        [float(np.float32(value)) for value in values] for values in ([x + 1 / 500 for x in theirs], theirs)
    )
    assert len({a - b for a, b in zip(ours, theirs, strict=True)}) > 1
    found = seeds_difference(ours, theirs, paired=True)
    assert (found.p_value, math.isnan(found.low), math.isnan(found.high)) == (0.25, True, True)
    assert math.isnan(seeds_difference([0.6, 0.6], [0.61, 0.61], paired=False).p_value)


# Mean lengths.


def test_the_interval_of_a_mean_length_is_the_jackknifes():
    sums, counts = np.array([30.0, 14.0, 50.0, 0.0, 22.0]), np.array([3.0, 1.0, 3.0, 0.0, 2.0])
    left_out = [np.delete(sums, k).sum() / np.delete(counts, k).sum() for k in range(5)]
    error = math.sqrt(4 / 5 * ((left_out - np.mean(left_out)) ** 2).sum())
    half = scipy.stats.t.ppf(0.975, 3) * error  # Four problems have a response.
    mean = sums.sum() / counts.sum()
    assert ratio_interval([sums], [counts]) == pytest.approx((mean - half, mean + half))
    # Of two datasets the differences between them do not count.
    lengths = np.array([10.0, 14.0, 30.0, 22.0])
    both = ratio_interval([3 * lengths, 3 * (lengths + 1000)], [[3] * 4, [3] * 4])
    half = scipy.stats.t.ppf(0.975, 6) * scipy.stats.sem(lengths) / math.sqrt(2)
    assert both == pytest.approx((519 - half, 519 + half))
    for sums, counts in (([[0.0, 0.0]], [[0, 0]]), ([[7.0, 0.0]], [[1, 0]]), ([[3.0], [4.0, 5.0]], [[2], [1, 1]])):
        assert all(math.isnan(limit) for limit in ratio_interval(sums, counts)), "fewer than two problems"

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from grail_lightning.evaluate.statistics import (
    average_interval,
    difference_interval,
    holm,
    mean_interval,
    ratio_interval,
    sign_flip_p,
)
from grail_lightning.functional import pass_at_k, pass_at_k_variance


def _interval(correct, k=1):
    """The interval of pass@k of `[N, n]` right and wrong samples."""
    n, c = correct.shape[1], correct.sum(1)
    return mean_interval(pass_at_k(n, c, k), pass_at_k_variance(n, c, k))


def _wilson(p, n):
    z = 1.959964
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - z * half / (1 + z * z / n), centre + z * half / (1 + z * z / n)


def _drawn(number, samples, rate, spread, generator):
    """Samples of `number` problems; their difficulty is the same, drawn evenly about `rate`, or all or nothing."""
    if spread == "all or nothing":
        chances = (torch.rand(number, generator=generator) < rate).double()
    else:
        width = min(rate, 1 - rate) if spread == "even" else 0.0
        chances = rate + width * (2 * torch.rand(number, generator=generator, dtype=torch.float64) - 1)
    return torch.rand(number, samples, generator=generator, dtype=torch.float64) < chances[:, None]


@pytest.mark.parametrize("spread", ["none", "even", "all or nothing"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("number", [30, 200, 500])
def test_the_interval_covers_the_truth(number, samples, rate, spread):
    generator = torch.Generator().manual_seed(0)
    repetitions = 300
    covered = 0
    for _ in range(repetitions):
        low, high = _interval(_drawn(number, samples, rate, spread, generator))
        covered += low <= rate <= high
    # Three standard errors of a share of 0.95 in 300 repetitions are 0.038; the benchmark measures more closely.
    assert covered / repetitions >= 0.912


@pytest.mark.parametrize("k", [1, 2])
def test_problems_that_are_all_solved_alike_are_not_certainty(k):
    third = torch.tensor([[True, False, False]]).expand(30, -1)
    low, high = _interval(third, k)
    mean = {1: 1 / 3, 2: 2 / 3}[k]
    assert low < mean < high
    # No narrower than 90 independent samples would tell, no wider than 30 problems of yes and no.
    least, most = (tuple(edge for edge in _wilson(mean, n)) for n in (90, 30))
    assert most[1] - most[0] > high - low
    assert high - low > (least[1] - least[0] if k == 1 else 0.1)


def test_with_many_problems_the_interval_is_mean_and_standard_error():
    generator = torch.Generator().manual_seed(0)
    correct = _drawn(20_000, 4, 0.4, "even", generator)
    low, high = _interval(correct)
    shares = correct.double().mean(1)
    half = 1.959964 * float(shares.std()) / math.sqrt(len(shares))
    # Wilson's correction is of the order of 1/N, one percent of the half width here.
    assert low == pytest.approx(float(shares.mean()) - half, abs=0.01 * half)
    assert high == pytest.approx(float(shares.mean()) + half, abs=0.01 * half)


def test_where_each_problem_is_a_yes_or_a_no_the_interval_is_wilsons():
    correct = torch.tensor([True, False, False, False]).repeat(10)[:, None]
    assert _interval(correct) == pytest.approx(_wilson(0.25, 40), rel=1e-6)
    assert _interval(correct.expand(-1, 4)) == pytest.approx(_wilson(0.25, 40), rel=1e-6)
    assert _interval(torch.tensor([[True, False]])) == pytest.approx(_wilson(0.5, 1), rel=1e-6)
    assert all(math.isnan(limit) for limit in _interval(torch.zeros(0, 3, dtype=torch.bool)))
    assert all(math.isnan(limit) for limit in difference_interval([], []))


@pytest.mark.parametrize("weights", [None, [0.75, 0.25]])
def test_the_interval_of_an_average_adds_weighted_half_widths_in_quadrature(weights):
    one, two = weights or (0.5, 0.5)
    low, high = average_interval([0.4, 0.6], [(0.1, 0.43), (0.2, 0.64)], weights)
    assert low == pytest.approx(one * 0.4 + two * 0.6 - math.hypot(one * 0.3, two * 0.4))
    assert high == pytest.approx(one * 0.4 + two * 0.6 + math.hypot(one * 0.03, two * 0.04))


def test_nothing_right_is_not_certainty():
    low, high = _interval(torch.zeros(30, 1, dtype=torch.bool))
    # Wilson at 0 of n: upper limit z²/(n + z²).
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(1.959964**2 / (30 + 1.959964**2), rel=1e-4)


@pytest.mark.parametrize("better", [0, 3, 30])
def test_for_yes_and_no_the_interval_of_a_difference_is_bonett_and_prices(better):
    n, worse = 40, 2
    d = np.array([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))
    # Bonett and Price (2012): one is added to both counts of problems that differ.
    p12, p21 = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = scipy.stats.t.ppf(0.975, n - 1) * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    low, high = difference_interval(d, np.zeros(n))
    assert (low, high) == pytest.approx((p12 - p21 - half, p12 - p21 + half))


def test_with_many_problems_the_interval_of_a_difference_is_students():
    d = np.random.default_rng(0).choice([-2 / 3, -1 / 3, 0, 1 / 3, 2 / 3], 50_000)
    known = scipy.stats.ttest_1samp(d, 0).confidence_interval()
    assert difference_interval(d, np.zeros(len(d))) == pytest.approx(tuple(known), abs=0.001 * (known[1] - known[0]))


def test_runs_that_agree_everywhere_are_not_certainly_equal():
    low, high = difference_interval(np.zeros(30), np.zeros(30))
    # Of 30 problems none differs: at most 3/30 do, by the rule of three.
    assert -high == low
    assert 0.05 < high < 0.1


def test_a_difference_of_all_problems_alike_has_the_noise_of_its_samples():
    third = np.full(30, 1 / 3)
    low, high = difference_interval(third, np.full(30, 2 / 9 / 3))
    least = 1.96 * math.sqrt(2 / 9 / 3 / 30)
    assert high - low > 2 * least
    assert low < 1 / 3 < high


@pytest.mark.parametrize("number", [2, 5, 9])
def test_signs_are_enumerated_as_scipy_does(number):
    draw = np.random.default_rng(number)
    for _ in range(20):
        d = draw.choice([-1.0, -2 / 3, -1 / 3, 0.1, 1 / 3, 2 / 3], number)
        known = scipy.stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
        # scipy doubles the smaller tail, which is the same: the distribution is symmetric.
        assert sign_flip_p(np.append(d, [0.0, 0.0])) == pytest.approx(known)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (7, 3), (10, 10)])
def test_for_yes_and_no_the_sign_flip_test_is_mcnemars(better, worse):
    known = scipy.stats.binomtest(better, better + worse, 0.5).pvalue if better + worse else 1.0
    assert sign_flip_p([1.0] * better + [-1.0] * worse) == pytest.approx(known)


def test_signs_of_many_problems_are_not_enumerated():
    assert sign_flip_p(np.ones(21)) is None
    assert sign_flip_p(np.append(np.ones(20), np.zeros(1000))) == pytest.approx(2 / 2**20)


def test_holm_is_the_closed_test_of_bonferronis():
    """The corrected p-value of a hypothesis is the largest Bonferroni p-value of the sets that contain it."""
    draw = np.random.default_rng(0)
    for number in range(1, 7):
        p = list(draw.random(number) ** 3)
        sets = [s for size in range(1, number + 1) for s in itertools.combinations(range(number), size)]
        closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(number)]
        assert holm(p) == pytest.approx(closed)


def test_what_was_not_tested_does_not_count_in_a_family():
    corrected = holm([math.nan, 0.02, math.nan, 0.03])
    assert corrected[1::2] == pytest.approx([0.04, 0.04])
    assert math.isnan(corrected[0])
    assert math.isnan(corrected[2])
    assert holm([]) == []


def test_a_mean_length_of_problems_with_as_many_responses_has_students_interval():
    lengths = np.array([10.0, 14.0, 30.0, 22.0])
    expected = scipy.stats.t.interval(0.95, 3, loc=lengths.mean(), scale=scipy.stats.sem(lengths))
    assert ratio_interval([3 * lengths], [[3, 3, 3, 3]]) == pytest.approx(expected)
    # Of two datasets the differences between them do not count.
    both = ratio_interval([3 * lengths, 3 * (lengths + 1000)], [[3] * 4, [3] * 4])
    half = scipy.stats.t.ppf(0.975, 6) * scipy.stats.sem(lengths) / math.sqrt(2)
    assert both == pytest.approx((519 - half, 519 + half))


def test_a_mean_length_of_right_responses_is_covered_where_long_problems_have_few_of_them():
    generator = np.random.default_rng(0)
    # A problem is right with the probability p, evenly drawn, and then has 100 · (2 - p) tokens: E[xy]/E[x] = 400/3.
    covered = 0
    for _ in range(400):
        p = generator.uniform(size=40)
        right = generator.binomial(3, p)
        low, high = ratio_interval([100 * (2 - p) * right], [right])
        covered += low <= 400 / 3 <= high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize(
    ("sums", "counts"), [([[0.0, 0.0]], [[0, 0]]), ([[7.0, 0.0]], [[1, 0]]), ([[3.0], [4.0, 5.0]], [[2], [1, 1]])]
)
def test_a_mean_length_of_fewer_than_two_problems_has_no_interval(sums, counts):
    assert all(math.isnan(limit) for limit in ratio_interval(sums, counts))

import math

import numpy as np
import pytest
import scipy.stats

from grail_lightning.evaluate.seeds import difference, estimate, seed_spread
from grail_lightning.evaluate.statistics import average_interval, difference_interval, mean_interval

RNG = np.random.default_rng


def _shares(problems, seeds, rate=0.5, of_problems=0.2, of_seeds=0.0, seed=0, samples=4):
    """The shares and their noise, ``[N, S]`` each."""
    draw = RNG(seed)
    chance = rate + of_problems * draw.uniform(-1, 1, (problems, 1)) + of_seeds * draw.standard_normal((1, seeds))
    shares = draw.binomial(samples, chance.clip(0, 1)) / samples
    return shares, shares * (1 - shares) / samples


def test_one_seed_and_one_dataset_have_the_interval_of_the_problems():
    shares, noise = _shares(60, 1)
    found = estimate([shares], [noise], [1.0])
    assert found.value == pytest.approx(shares.mean())
    assert (found.low, found.high) == pytest.approx(mean_interval(shares[:, 0], noise[:, 0]))


def test_an_average_has_the_interval_of_its_datasets():
    parts = [_shares(40, 1, 0.2, seed=1), _shares(200, 1, 0.7, seed=2)]
    weights = [40 / 240, 200 / 240]
    found = estimate([t for t, _ in parts], [n for _, n in parts], weights)
    means = [t.mean() for t, _ in parts]
    known = average_interval(means, [mean_interval(t[:, 0], n[:, 0]) for t, n in parts], weights)
    assert found.value == pytest.approx(np.concatenate([t for t, _ in parts]).mean())
    assert (found.low, found.high) == pytest.approx(known)


@pytest.mark.parametrize("seeds", [2, 4])
def test_seeds_that_differ_widely_have_students_interval_over_seeds(seeds):
    shares, noise = _shares(400, seeds, of_seeds=0.08)
    found = estimate([shares], [noise], [1.0])
    known = scipy.stats.ttest_1samp(shares.mean(0), 0).confidence_interval()
    # The problems' part is added, so it is not narrower; here the seeds' part is the larger one.
    assert found.low == pytest.approx(max(0.0, known.low), abs=1e-9)
    assert found.high == pytest.approx(min(1.0, known.high), abs=1e-9)


def test_the_excess_of_seeds_is_their_variance_component():
    """Var(mean) of a crossed design: the seeds' part is estimated without bias before it is cut off at 0."""
    found = [seed_spread([_shares(200, 8, of_seeds=0.05, seed=seed)[0]], [1.0]) for seed in range(200)]
    assert np.mean([spread.excess for spread in found]) == pytest.approx(0.05**2 / 8, rel=0.1)
    alike = [seed_spread([_shares(200, 8, seed=seed)[0]], [1.0]) for seed in range(200)]
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


def _compared(ours, theirs, weights=(1.0,), paired=True):
    noises = [(np.zeros_like(a), np.zeros_like(b)) for a, b in zip(ours, theirs, strict=True)]
    return difference(ours, theirs, noises, weights, paired)


def test_the_difference_of_two_runs_pairs_their_problems():
    draw = RNG(0)
    theirs = (draw.random((200, 1)) < 0.5).astype(float)
    ours = theirs.copy()
    ours[:30] = 1.0
    found = _compared([ours], [theirs])
    d = (ours - theirs)[:, 0]
    assert found.value == pytest.approx(d.mean())
    assert (found.low, found.high) == pytest.approx(difference_interval(d, np.zeros(200)))
    assert d.sum() <= 20
    assert found.p_value == pytest.approx(2 / 2 ** int(d.sum())), "only problems that differ count, exactly"


def test_where_many_problems_differ_the_interval_and_the_p_value_agree():
    """The p-value is below 0.05 if and only if the interval leaves 0 out."""
    seen = set()
    for seed in range(60):
        ours, theirs = (_shares(120, 1, rate, seed=seed * 2 + k)[0] for k, rate in enumerate((0.56, 0.5)))
        found = _compared([ours], [theirs])
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
    found = _compared([ours], [theirs], paired=paired)
    a, b = ours.mean(0), theirs.mean(0)
    known = scipy.stats.ttest_rel(a, b) if paired else scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found.p_value == pytest.approx(known.pvalue, rel=0.05)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()), abs=0.005)
    assert found.seeds.df == pytest.approx(known.df)


def test_one_seed_of_a_method_says_nothing_about_others():
    ours, theirs = _shares(100, 1, seed=1)[0], _shares(100, 3, of_seeds=0.2, seed=2)[0]
    found = _compared([ours], [theirs], paired=False)
    assert found.seeds is None
    d = ours[:, 0] - theirs.mean(1)
    assert (found.low, found.high) == pytest.approx(difference_interval(d, np.zeros(100)))


def test_the_smallest_detectable_difference_is_found_in_four_of_five_repetitions():
    """Runs that truly differ by it: how often is the p-value below the level?"""
    draw = RNG(0)
    theirs = (draw.random((300, 1)) < 0.5).astype(float)

    def repeated(effect, level):
        found = 0
        for _ in range(400):
            base = draw.random(300)
            a = (base < 0.5 + effect).astype(float)
            flipped = draw.random(300) < 0.2
            a[flipped] = (draw.random(int(flipped.sum())) < 0.5 + effect).astype(float)
            b = (base < 0.5).astype(float)
            found += _compared([a[:, None]], [b[:, None]]).p_value < level
        return found / 400

    base = draw.random(300)
    flipped = draw.random(300) < 0.2
    ours, theirs = (base < 0.57).astype(float), (base < 0.5).astype(float)
    ours[flipped] = (draw.random(int(flipped.sum())) < 0.57).astype(float)
    pilot = _compared([ours[:, None]], [theirs[:, None]])
    assert repeated(pilot.detectable(), 0.05) == pytest.approx(0.8, abs=0.1)
    assert pilot.detectable(5) > pilot.detectable()
    assert repeated(pilot.detectable(5), 0.01) == pytest.approx(0.8, abs=0.1)


def test_detectable_differences_with_seeds_are_those_of_students_test_over_seeds():
    ours, theirs = (_shares(300, 5, of_seeds=0.06, seed=k)[0] for k in (1, 2))
    d = ours.mean(0) - theirs.mean(0)
    found = _compared([ours], [theirs])
    for comparisons in (1, 7):
        effect = found.detectable(comparisons) / (d.std(ddof=1) / math.sqrt(5))
        limit = scipy.stats.t.ppf(1 - 0.025 / comparisons, 4)
        assert scipy.stats.nct.sf(limit, 4, effect) == pytest.approx(0.8, abs=1e-4)


def test_equal_runs_do_not_differ():
    same, _ = _shares(50, 3)
    found = _compared([same], [same])
    assert (found.value, found.p_value) == (0.0, 1.0)
    assert found.low < 0 < found.high
    assert found.detectable() > 0

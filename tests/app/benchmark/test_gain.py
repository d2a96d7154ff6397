"""The gain of a step: against loops, against cases whose figures are known, and the coverage of its intervals."""

import math

import numpy as np
import pytest
import torch

from grail_lightning.app.benchmark.gain import (
    best_gains,
    best_of,
    direction,
    gain_figures,
    gains,
    interval,
    of_pairs,
    resampled,
    signal_share,
)
from grail_lightning.app.benchmark.gradients import References, products
from tests.tolerance import near

N = 12
ONCE = torch.ones(1, N, dtype=torch.float64)


def noisy(seed, mean=1.0, noise=1.0, size=30):
    """Gradients of N batches with a common mean."""
    draws = torch.Generator().manual_seed(seed)
    return mean + noise * torch.randn(N, size, dtype=torch.float64, generator=draws)


def references(uniform, constant, limit):
    """Two lower baselines and two limits, the second one of each without a gain."""
    tables = [products(one, uniform) for one in (uniform, constant, limit)]
    return References(
        uniform=tables[0],
        constants={"r": tables[1], "none": tables[0]},
        limits={"Q": tables[2], "none": tables[0]},
    )


def told(method, uniform, **more):
    tables = {"method": method, "uniform": uniform, **more}
    return gain_figures({name: products(one, uniform) for name, one in tables.items()}, draws=200)


def test_uniform_credit_gains_what_it_gains_and_a_multiple_of_it_too():
    """A constant weight is no choice of tokens: the gain is 1, the share 0, the direction the same."""
    uniform = noisy(0)
    by = references(uniform, 0.5 * uniform + 0.5 * noisy(1), uniform.mean(0) + 0.5 * noisy(2, 0))
    for factor, roundings in ((1.0, 0), (3.7, 100)):
        tables = {"method": products(factor * uniform, uniform), "uniform": products(uniform, uniform)}
        found = gain_figures(tables, by, draws=200).figures
        for optimiser in ("sgd", "adam"):
            assert found["gain"][optimiser] == near([1.0] * 3, roundings)
            assert found["share_of_limit"][optimiser] == near([0.0] * 3, roundings, scale=100)
        assert found["direction"] == near([1.0] * 3, 100)


def test_the_negative_of_uniform_credit_gains_minus_one():
    found = told(-noisy(0), noisy(0)).figures
    assert found["gain"] == {"sgd": near([-1.0] * 3, 100), "adam": near([-1.0] * 3, 100)}
    assert found["direction"] == near([-1.0] * 3, 100)


def dot(one, other):
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def by_loops(ours, uniform, draw):
    """The figures of one draw, over its batches as a list in which a batch may stand several times."""
    drawn = [k for k, times in enumerate(draw) for _ in range(times)]

    def of_two(these, those):
        pairs = [dot(these[i], those[j]) for i in drawn for j in drawn if i != j]
        return math.fsum(pairs) / len(pairs)

    def scaled(rows):
        sizes = [math.sqrt(math.fsum(row[p] ** 2 for row in rows) / len(rows)) for p in range(len(rows[0]))]
        return [[value / size for value, size in zip(row, sizes, strict=True)] for row in rows]

    def rms(rows):
        return math.sqrt(math.fsum(dot(rows[k], rows[k]) for k in drawn) / len(drawn))

    own, base = ours.tolist(), uniform.tolist()
    return {
        "sgd": (of_two(own, base) / rms(own)) / (of_two(base, base) / rms(base)),
        "adam": of_two(scaled(own), base) / of_two(scaled(base), base),
        "direction": of_two(own, base) / math.sqrt(of_two(own, own) * of_two(base, base)),
        "noise": rms(own) ** 2 / of_two(own, own) - 1,
    }


def test_figures_of_each_draw_are_those_of_loops_over_its_batches():
    """A batch that is drawn twice is no pair with itself, and one that is not drawn counts for Adam's scale."""
    uniform = noisy(3, mean=2.0)
    ours = torch.linspace(0, 2, 30).double() * uniform + 0.5 * noisy(4, 0.0)
    draws = torch.cat([ONCE, resampled(N, 4)[1:]])
    tables = products(ours, uniform), products(uniform, uniform)
    found = gains(*tables, draws)
    found |= {"direction": direction(*tables, draws), "noise": 1 / signal_share(tables[0], draws) - 1}
    expected = [by_loops(ours, uniform, draw) for draw in draws.long().tolist()]
    assert expected[0]["direction"] < 1
    assert {name: values.tolist() for name, values in found.items()} == {
        name: near([one[name] for one in expected], 1000) for name in found
    }


def test_noise_that_differs_between_two_halves_drops_out():
    """Each half adds noise of its own, which only the two halves' mean has: Adam's scale, but no power or signal."""
    mean, own = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    none = torch.zeros_like(own)
    uniform = torch.cat([mean.expand(N, -1), own, none, none], 1)
    one, other = (torch.cat([mean.expand(N, -1), own, *n], 1) for n in ((9 * own, none), (none, 9 * own)))
    tables = products(one, uniform, other), products(uniform, uniform)
    assert gains(*tables, ONCE) == {"sgd": near([1.0], 100), "adam": near([1.0], 100)}
    assert (1 / signal_share(tables[0], ONCE) - 1).tolist() == near([1 / 25], 100)


def test_products_of_blocks_are_those_of_the_whole(monkeypatch):
    ours, uniform = noisy(5), noisy(6)
    whole = products(ours, uniform)
    monkeypatch.setattr("grail_lightning.app.benchmark.gradients._BLOCK", 7)
    blocks = products(ours, uniform)
    for part in ("own", "power", "along", "adam"):
        torch.testing.assert_close(getattr(blocks, part), getattr(whole, part), rtol=1e-12, atol=1e-10)


def test_shares_and_differences_are_paired_with_the_best_reference():
    uniform = noisy(0, noise=1.5)
    better = uniform.mean(0) + (uniform - uniform.mean(0)) / 2  # The same mean with half the noise.
    best = uniform.mean(0) + (uniform - uniform.mean(0)) / 3
    by = references(uniform, better, best)
    tables = {"method": products(better, uniform), "uniform": products(uniform, uniform)}
    tables["balanced"] = tables["uniform"]
    tables["Shuffled"] = tables["uniform"]
    found = gain_figures(tables, by, draws=200)
    assert best_of(by, "limits") == {"sgd": "Q", "adam": "Q"}
    beside = found.figures["gain_beside_baseline"]
    once = torch.ones(1, N, dtype=torch.float64)
    limit = best_gains(by, "limits", N, once)
    for optimiser in ("sgd", "adam"):
        assert beside["best_constant"][optimiser] == [0.0, 0.0, 0.0]  # The method is this baseline.
        assert beside["balanced"][optimiser] == [0.0, 0.0, 0.0]
        assert found.figures["controls"]["Shuffled"]["gain"][optimiser] == [1.0, 1.0, 1.0]
        gain = found.figures["gain"][optimiser][0]
        assert gain > 1.05
        share = found.figures["share_of_limit"][optimiser]
        assert share[0] == near((gain - 1) / (float(limit[optimiser][0]) - 1), 100)
        assert 0 < share[1] < share[0] < share[2]
    assert found.reasons == {}


def test_what_does_not_apply_is_none_and_has_a_reason():
    uniform = noisy(0)
    without = told(torch.zeros_like(uniform), uniform)
    assert without.figures["gain"] is None
    assert without.reasons["gain"] == "The method gives no token an advantage."
    tables = {name: products(uniform[:5], uniform[:5]) for name in ("method", "uniform")}
    few = gain_figures(tables)
    assert few.figures["direction"] is None
    assert few.reasons["direction"] == "A gain needs at least 8 batches, but there are 5."
    alone = told(uniform, uniform)
    assert alone.figures["share_of_limit"] == {"sgd": None, "adam": None}
    assert alone.figures["gain_beside_baseline"]["best_constant"] is None
    assert set(alone.reasons) == {"share_of_limit", "gain_beside_baseline.best_constant"}
    pure = told(uniform, noisy(7, mean=0.0, noise=1.0))
    assert (
        pure.figures["gain"]["sgd"] is None or pure.figures["gain"]["sgd"][2] > 5
    )  # Of noise alone anything is a gain.


def test_draws_without_a_gain_of_uniform_credit_count_on_both_sides():
    """One of 200 leaves the interval as it is, and one of ten leaves none."""
    values = torch.linspace(-1, 1, 200).double()
    few, many = values.clone(), values.clone()
    few[50], many[::10] = torch.nan, torch.nan
    one, other = (interval(torch.cat([torch.zeros(1).double(), some]), 32) for some in (few, values))
    assert one == pytest.approx(other, abs=0.02)
    assert interval(torch.cat([torch.zeros(1).double(), many]), 32) is None


def test_references_of_more_batches_are_cut_to_the_first_ones():
    uniform, other = noisy(0), noisy(1)
    by = references(uniform, other, other)
    cut = by.first(9)
    once = torch.ones(1, 9, dtype=torch.float64)
    assert of_pairs(cut.uniform.along, once)[0] == near(
        float(of_pairs(products(uniform[:9], uniform[:9]).along, once)), 100
    )
    assert best_gains(by, "constants", 9, once)["sgd"][0] == gains(cut.constants["r"], cut.uniform, once)["sgd"][0]


def test_an_interval_is_wider_than_plain_percentiles_by_students_factor():
    """Of the mean of standard normal values the plain limits are 1.96, the expanded ones 2.20 · sqrt(12 / 11)."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(400_000))
    low, high = interval(torch.cat([torch.zeros(1, dtype=torch.float64), values]), N)[1:]
    assert -low == pytest.approx(2.201 * math.sqrt(12 / 11), rel=0.02)
    assert high == pytest.approx(2.201 * math.sqrt(12 / 11), rel=0.02)


# --- coverage ---------------------------------------------------------------------------------------------------------

SIZE, SIGNAL = 40, 1 / math.sqrt(40)


def coverage(number, repetitions, noise, seed):
    """The share of repetitions whose interval holds the truth, by figure, with noise of decaying directions.

    The method's gradient has 0.8 of the noise of uniform credit and some of its own; its mean is 0.95 of that of
    uniform credit and 0.1 in another direction. Adam's scale is fixed by the choice of directions of one size.
    """
    random = np.random.default_rng(seed)
    spread = np.sqrt(noise / np.arange(1, SIZE + 1) / np.sum(1 / np.arange(1, SIZE + 1)))
    uniform_mean = np.full(SIZE, SIGNAL)
    other = np.where(np.arange(SIZE) % 2, SIGNAL, -SIGNAL)
    method_mean = 0.95 * uniform_mean + 0.1 * other
    power = {"u": 1 + noise, "m": 0.95**2 + 0.01 + noise * (0.64 + 0.16), "l": 1 + noise * 0.5}
    along = {"u": 1.0, "m": 0.95, "l": 1.0}
    gain = {name: along[name] / math.sqrt(power[name]) * math.sqrt(power["u"]) for name in power}
    truths = {
        "gain": gain["m"],
        "share": (gain["m"] - 1) / (gain["l"] - 1),
        "beside": gain["m"] - gain["l"],
        "direction": 0.95 / math.hypot(0.95, 0.1),
        "noise": power["m"] / (0.95**2 + 0.01) - 1,
    }
    held = dict.fromkeys(truths, 0)
    for repetition in range(repetitions):
        shared, own = (random.standard_normal((number, SIZE)) * spread for _ in range(2))
        uniform = torch.from_numpy(uniform_mean + shared)
        method = torch.from_numpy(method_mean + 0.8 * shared + 0.4 * own)
        limit = products(torch.from_numpy(uniform_mean + math.sqrt(0.5) * shared), uniform)
        base = products(uniform, uniform)
        by = References(uniform=base, constants={"c": limit}, limits={"l": limit})
        tables = {"method": products(method, uniform), "uniform": base}
        found = gain_figures(tables, by, seed=repetition, draws=400).figures
        told = {
            "gain": found["gain"]["sgd"],
            "share": found["share_of_limit"]["sgd"],
            "beside": found["gain_beside_baseline"]["best_constant"]["sgd"],
            "direction": found["direction"],
            "noise": found["noise"],
        }
        for name, limits in told.items():
            held[name] += limits is None or limits[1] <= truths[name] <= limits[2]
    return {name: number / repetitions for name, number in held.items()}


def test_intervals_hold_the_truth():
    """At least 92 %, less three standard errors of so few repetitions."""
    assert min(coverage(32, 60, 3.0, seed=0).values()) >= 0.92 - 3 * math.sqrt(0.92 * 0.08 / 60)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "noise"), [(32, 1.0), (32, 5.0), (32, 20.0), (8, 3.0)])
def test_intervals_have_at_least_92_percent_coverage(number, noise):
    found = coverage(number, 600, noise, seed=1)
    assert min(found.values()) >= 0.92, found

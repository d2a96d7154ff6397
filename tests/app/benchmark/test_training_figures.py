"""What the training of a method shows, from curves by seed."""

import math

import numpy as np
import pytest
from scipy import stats

from grail_lightning.app.benchmark.training_figures import BASELINE, Arms, training_figures


def curves(*ends, start=0.4, middle=0.5, steps=(0, 20, 60)):
    """Curves of seeds 0, 1, ... that end at these accuracies."""
    return {seed: dict(zip(steps, (start, middle, end), strict=True)) for seed, end in enumerate(ends)}


ARMS = Arms(curves(0.70, 0.74, 0.75), curves(0.68, 0.70, 0.74), curves(0.71, 0.75, 0.73))


def test_differences_are_paired_by_seed_and_in_points():
    figures, reasons = training_figures({"sums": ARMS})
    found = figures["sums"]
    assert reasons == {}
    ours, theirs = np.array([70, 74, 75.0]), np.array([68, 70, 74.0])
    test = stats.ttest_rel(ours, theirs)
    low, high = test.confidence_interval(0.95)
    assert found["end"] == pytest.approx([np.mean(ours - theirs), low, high], abs=1e-3)
    assert found["p_end"] == pytest.approx(test.pvalue)
    # The curves part between steps 20 and 60, two thirds of the training: the mean has a third of the difference.
    assert found["over_training"] == pytest.approx([value / 3 for value in found["end"]], abs=1e-3)
    assert found["seeds"] == [0, 1, 2]
    assert found["steps"] == 60
    assert found["beside_baseline"]["baseline"] == BASELINE
    assert found["beside_baseline"]["end"][0] == pytest.approx((-1 - 1 + 2) / 3, abs=1e-3)


def test_all_worlds_and_both_references_are_one_family_of_an_outcome():
    figures, _ = training_figures({"sums": ARMS, "words": ARMS._replace(method=curves(0.8, 0.79, 0.78))})
    places = [place for world in figures.values() for place in (world, world["beside_baseline"])]
    for p, p_holm in (("p", "p_holm"), ("p_end", "p_holm_end")):
        raw = [place[p] for place in places]
        assert len(set(raw)) == 4
        smallest = min(places, key=lambda place: place[p])
        assert smallest[p_holm] == pytest.approx(min(1, 4 * smallest[p]))
    # The true difference that Student's test at 0.05 / 4 finds with a probability of 0.8, by the noncentral t.
    sd = np.std([2.0, 4.0, 1.0], ddof=1) / math.sqrt(3)
    limit = stats.t.ppf(1 - 0.025 / 4, 2)
    power = stats.nct.sf(limit, 2, figures["sums"]["detectable_end"] / sd)
    assert power == pytest.approx(0.8, abs=1e-3)


def test_bands_are_students_intervals_at_the_steps_that_all_runs_have():
    late = ARMS.method | {2: {0: 0.4, 20: 0.5, 59: 0.75, 60: 0.75}}  # Its last batch had no live row.
    figures, _ = training_figures({"sums": ARMS._replace(method=late)})
    band = figures["sums"]["curves"]["method"]
    assert band["steps"] == [0, 20, 60]
    ends = [0.70, 0.74, 0.75]
    assert band["mean"] == pytest.approx([0.4, 0.5, np.mean(ends)], abs=1e-5)
    low, high = stats.t.interval(0.95, 2, np.mean(ends), stats.sem(ends))
    assert (band["low"][-1], band["high"][-1]) == pytest.approx((low, high), abs=1e-5)
    assert band["low"][0] is None


def test_one_seed_and_seeds_that_differ_alike_have_a_reason_in_place_of_an_interval():
    figures, reasons = training_figures({"sums": Arms(*(curves(curve[0][60]) for curve in ARMS))})
    assert figures["sums"]["end"] is None
    assert figures["sums"]["p"] is figures["sums"]["p_holm"] is None
    assert "two seeds" in reasons["sums.beside_baseline.over_training"]
    figures, reasons = training_figures({"sums": ARMS._replace(method=ARMS.uniform)})
    assert figures["sums"]["over_training"] is None
    assert figures["sums"]["p"] == 1.0
    assert figures["sums"]["detectable"] is None
    assert "0.00 points with every seed" in reasons["sums.over_training"]
    assert figures["sums"]["beside_baseline"]["over_training"] is not None


def test_seeds_that_an_arm_lacks_are_left_out_and_other_lengths_refused():
    figures, _ = training_figures({"sums": ARMS._replace(uniform={seed: ARMS.uniform[seed] for seed in (0, 2)})})
    assert figures["sums"]["seeds"] == [0, 2]
    longer = curves(0.7, 0.7, 0.7, steps=(0, 20, 120))
    with pytest.raises(ValueError, match="must have one length"):
        training_figures({"sums": ARMS._replace(baseline=longer)})

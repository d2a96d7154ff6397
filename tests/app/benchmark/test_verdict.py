"""Every claim of a verdict follows from an interval, and a null says what it excludes."""

import math
import re
from statistics import NormalDist

import numpy as np
import pytest

from grail_lightning.app.benchmark import claims as words
from grail_lightning.app.benchmark.claims import Claim, Finding, by_sign, number, widened
from grail_lightning.app.benchmark.verdict import findings, verdict
from grail_lightning.app.results.statistics import Estimate
from tests.app.benchmark.made import (
    auroc,
    both,
    grail,
    oracle,
    references,
    result,
    score,
    training,
    tree,
    uniform,
    within,
    world,
)


def _sums(forks=(0.5, 0.5), rollout=(0.5, 0.5), **others):
    """The verdict of a method in one world, as one text."""
    figures = world("sums", forks, rollout, **{key: others.pop(key) for key in ("gain", "beside") if key in others})
    return " ".join(verdict(result("Mine", {"sums": figures | others}), references()))


# Intervals.


def test_widened_intervals_hold_together():
    # Twenty figures that are normal: each interval has 95 %, all together less; the widened ones have 95 % together.
    draws = np.random.default_rng(0).standard_normal((4000, 20))
    one = Estimate(value=0.0, low=-NormalDist().inv_cdf(0.975), high=NormalDist().inv_cdf(0.975))
    half = widened(one, 20).high
    assert (abs(draws) < one.high).all(axis=1).mean() < 0.5
    together = (abs(draws) < half).all(axis=1).mean()
    assert abs(together - 0.95) < 4 * math.sqrt(0.05 * 0.95 / 4000)
    assert widened(one, 1) == one
    assert widened(one, 20, (-1.0, 2.5)) == Estimate(value=0.0, low=-1.0, high=2.5)


def test_the_side_of_an_interval_is_where_it_is_as_a_whole():
    intervals = {1: (0.6, 0.51, 0.7), 0: (0.6, 0.49, 0.7), -1: (0.4, 0.3, 0.49)}
    made = [
        Claim(world="sums", estimate=Estimate(value=v, low=a, high=b), neutral=0.5) for v, a, b in intervals.values()
    ]
    assert {sign: [claim.estimate.value for claim in some] for sign, some in by_sign(made).items()} == {
        1: [0.6],
        0: [0.6],
        -1: [0.4],
    }


def test_figures_in_words():
    assert number(-0.001) == "0.00"
    assert number(-0.11, 1) == "-0.1"
    assert words.listed(["a", "b", "c"]) == "a, b and c"
    assert words.listed(["a"]) == "a"
    assert str(Finding(claim="it is so", evidence="figures.")) == "It is so. Figures."
    assert str(Finding(claim="it is so")) == "It is so."


# Detection.


@pytest.mark.parametrize(
    ("forks", "said"),
    {
        (0.9, 0.9): "Finds slips and misconceptions.",
        (0.9, 0.5): "Finds slips, but not misconceptions.",
        (0.5, 0.9): "Finds misconceptions, but not slips.",
        (0.5, 0.5): "Finds neither slips nor misconceptions.",
        (0.9, 0.1): "Finds slips, and ranks misconceptions in sums below sound steps.",
        (0.1, 0.1): "Ranks slips in sums and misconceptions in sums below sound steps.",
        (0.1, 0.5): "Does not find misconceptions, and ranks slips in sums below sound steps.",
    }.items(),
)
def test_the_headline_says_what_is_found_at_forks(forks, said):
    assert said in _sums(forks)


def test_a_null_at_forks_says_what_it_excludes():
    # 0.55 ±0.08 and 0.5 ±0.04: two intervals of 95 % become wider by 2.2414 / 1.96 = 1.1436.
    said = _sums((within(0.55, 0.08), 0.5))
    assert "slips 0.55 (0.46 to 0.64) in sums, not to be told from chance: more than 0.64 is excluded" in said
    # A figure without any spread excludes everything else.
    assert "slips 0.50 (0.50 to 0.50) in sums, not to be told from chance;" in _sums(([0.5, 0.5, 0.5], 0.9))


def test_an_interval_that_excludes_chance_alone_does_not_do_so_among_many():
    one = [0.58, 0.502, 0.66]
    assert "Finds slips, but" not in _sums((one, 0.5)), "two figures"
    assert "Does not find" not in _sums((one, None))
    assert "Finds slips." in _sums((one, None)), "the only figure"


def test_worlds_in_which_an_error_is_found_are_named_if_not_all():
    worlds = {"sums": world("sums", 0.9, 0.5), "words": world("words", (0.9, 0.5), 0.5)}
    said = " ".join(verdict(result("Mine", worlds)))
    assert "Finds slips and misconceptions in sums alone." in said
    assert "slips 0.90 in sums and words (intervals from 0.85 to 0.95)" in said


def test_no_fork_at_all_is_said_with_its_reason():
    figures = world("sums", (None, None), 0.5)
    figures["reasons"]["auroc_forks"] = "No two rollouts part."
    said = " ".join(verdict(result("Mine", {"sums": figures})))
    assert "Whether it finds errors at forks is not measured. No two rollouts part." in said


def test_position_is_named_if_errors_are_ranked_high_within_a_rollout_alone():
    said = _sums((0.5, 0.9), (0.84, 0.9))
    assert "What it finds within a rollout may be position alone." in said
    assert "(slips 0.84 (0.80 to 0.88) in sums)" in said, "misconceptions are found at forks, too"
    assert "position alone reaches 1.00: so forks decide" in said
    assert "position alone" not in _sums((0.9, 0.9), (0.9, 0.9))
    assert "position alone" not in _sums((0.5, 0.5), (0.5, 0.2))
    alone = " ".join(verdict(result("Mine", {"sums": world("sums", 0.5, 0.8)})))
    assert "stand before the first error: so forks decide" in alone, "there is no row of the position"


def test_a_plain_score_that_does_as_well_is_named():
    assert "The plain score surprisal (-log p) finds slips as well. Its AUROC at forks: slips 1.00" in _sums(
        (0.97, 0.9)
    )
    assert "plain score" not in _sums((0.5, 0.9)), "surprisal is below chance at misconceptions"
    weaker = [score("entropy", (0.6, 0.6), 0.5)]
    said = " ".join(verdict(result("Mine", {"sums": world("sums", 0.9, 0.9)}), weaker))
    assert "plain score" not in said
    assert "plain score" not in " ".join(verdict(references()[4], references())), "not beside itself"


def test_controls_that_find_as_much_or_a_part_are_named():
    def control(*forks):
        names = ("slip", "misconception")
        return {"Shuffled": {"auroc_forks": dict(zip(names, map(auroc, forks), strict=True))}}

    said = _sums((0.9, 0.9), controls=control(0.88, 0.5))
    assert "Its control Shuffled does as well, so what it measures is not what finds them." in said
    assert "slips 0.88 (0.83 to 0.93) in sums" in said
    said = _sums((0.9, 0.9), controls=control(0.5, 0.65))
    assert "A part has another cause, which its control Shuffled shows." in said
    assert "misconceptions 0.65 (0.60 to 0.70) in sums" in said
    assert "control Shuffled" not in _sums((0.9, 0.9), controls=control(0.5, 0.5))
    assert "control Shuffled" not in _sums((0.5, 0.5), controls=control(0.9, 0.9)), "nothing is found that it explains"


def test_blame_is_compared_with_that_of_uniform_credit_where_errors_are_found():
    more = {"flawed": within(0.2, 0.02), "flawed_uniform": within(0.1, 0.02)}
    same = {"flawed": within(0.12, 0.02), "flawed_uniform": within(0.1, 0.02)}
    assert "Flawed steps get more of the blame than with uniform credit." in _sums((0.9, 0.9), blame=more)
    assert "0.20 in sums (uniform credit 0.10)" in _sums((0.9, 0.9), blame=more)
    assert "Flawed steps are not seen to get more of the blame." in _sums((0.9, 0.9), blame=same)
    assert "blame of wrong rollouts" not in _sums((0.5, 0.5), blame=more)


@pytest.mark.parametrize(
    ("value", "said"),
    {
        0.6: "It agrees with the measured effects of steps in sums. Rank correlation 0.60 (0.50 to 0.70) in sums.",
        0.05: "It is not seen to agree with the measured effects of steps in sums. Rank correlation 0.05 (-0.05 to "
        "0.15) in sums; more than 0.15 is excluded.",
        -0.6: "Its weights run against the measured effects of steps in sums. Rank correlation -0.60 (-0.70 to -0.50)",
    }.items(),
)
def test_agreement_with_measured_effects(value, said):
    assert said in _sums(values={"wrong": within(value, 0.1)})


# The gain of a step.


@pytest.mark.parametrize(
    ("gain", "said"),
    {
        1.1: "A step gains more than with uniform credit in sums. With Adam, relative to uniform credit: 1.10 (1.08 "
        "to 1.12) in sums; of what any credit could gain this is a share of 0.33 (0.25 to 0.41) in sums.",
        1.01: "The gain of a step is not seen to differ from that of uniform credit in sums. With Adam, relative to "
        "uniform credit: 1.01 (0.99 to 1.03) in sums; more than 1.03 is excluded.",
        0.9: "A step gains less than with uniform credit in sums. With Adam, relative to uniform credit: 0.90 (0.88",
    }.items(),
)
def test_the_gain_of_a_step(gain, said):
    assert said in _sums(gain=gain)


def test_a_gain_that_is_not_measured_has_its_reason_and_no_claim_about_training():
    said = " ".join(verdict(references()[4]))
    assert "What a step gains is not measured. A score has no weights." in said
    assert "trained" not in said


def test_the_other_optimiser_is_named_if_its_sign_differs():
    turned = {"adam": within(1.1, 0.02), "sgd": within(0.9, 0.02)}
    figures = world("sums", 0.5, 0.5) | {"gain": turned}
    said = " ".join(verdict(result("Mine", {"sums": figures})))
    assert "With SGD the difference has the other sign. 0.90 (0.88 to 0.92) in sums." in said
    assert "With SGD" not in _sums(gain=1.1)


def test_a_control_that_gains_as_much_is_named():
    same, less = ({"PermutedRewards": {"gain": both(value)}} for value in (1.09, 1.02))
    said = _sums(gain=1.1, controls=same)
    assert "Its control PermutedRewards gains about as much, so this is no effect of what it finds." in said
    assert "The control has 1.09 (1.07 to 1.11) in sums; the method has 1.10 (1.08 to 1.12) in sums." in said
    assert "PermutedRewards" not in _sums(gain=1.1, controls=less)
    assert "PermutedRewards" not in _sums(gain=1.0, controls={"PermutedRewards": {"gain": both(1.0)}})


@pytest.mark.parametrize(
    ("beside", "said"),
    {
        0.1: "Its gain is more than that of any lower baseline.",
        0.01: "Its gain in a step is that of a lower baseline. Beside the best one, the difference is 0.01 (-0.01 to "
        "0.03) in sums.",
        -0.1: "A lower baseline alone gains more. Beside the best one, the difference is -0.10 (-0.12 to -0.08)",
    }.items(),
)
def test_what_remains_beside_a_lower_baseline(beside, said):
    assert said in _sums(gain=1.1, beside=beside)
    assert said not in _sums(gain=0.9, beside=beside), "it gains less than uniform credit already"


def test_worlds_in_which_a_lower_baseline_explains_the_gain_are_named_if_not_all():
    worlds = {"sums": world("sums", 0.5, 0.5, 1.1, 0.0), "words": world("words", 0.5, 0.5, 1.1, 0.1)}
    said = " ".join(verdict(result("Mine", worlds)))
    assert "Its gain in a step is that of a lower baseline in sums." in said
    assert "Its gain is more than that of any lower baseline in words." in said
    assert "A step gains more than with uniform credit in all 2 worlds." in said


@pytest.mark.parametrize(
    ("balanced", "gain", "said"),
    [
        (0.1, 1.1, "With praise and blame of equal size a step still gains more in sums."),
        (0.1, 0.9, "With praise and blame of equal size a step still gains more in sums."),
        (0.0, 1.1, "With praise and blame of equal size nothing of its gain is seen to remain in sums."),
        (-0.1, 1.0, "With praise and blame of equal size a step loses in sums."),
        (0.0, 1.0, None),
    ],
)
def test_what_remains_with_equal_praise_and_blame(balanced, gain, said):
    figures = world("sums", 0.5, 0.5, gain, balanced=balanced)
    text = " ".join(verdict(result("Mine", {"sums": figures})))
    assert said in text if said else "equal size" not in text


# Training and cost.


def test_differences_in_training_and_what_is_excluded():
    said = _sums(training=training(2.0, 0.01, 0.2, 0.9))
    assert "Training in sums is better than with uniform credit. Sums, as a mean over training: +2.0 points" in said
    assert "p = 0.010 (Holm), at the end: +1.0 points (-1.4 to 3.4)" in said
    assert "Training in sums is not seen to differ from that with the lower baseline." in said
    assert "Sums (r - mean/2), as a mean over training: +0.2 points (-1.7 to 2.1), p = 0.900 (Holm)" in said
    assert "more than 2.1 points better or 1.7 worse is excluded, and 2.6 points would be found four times in" in said
    said = _sums(training=training(-2.0, 0.0001, -4.0, 0.01))
    assert "Training in sums is worse than with uniform credit." in said
    assert "p < 0.001 (Holm)" in said
    assert "Training in sums is worse than with the lower baseline." in said


def test_a_difference_in_training_needs_its_corrected_p_value():
    # The interval excludes 0, but not after the correction for the number of comparisons.
    assert "Training in sums is not seen to differ from that with uniform" in _sums(training=training(1.5, 0.06))
    said = _sums(training=training(1.5, 0.06))
    assert "better or 0.0 worse is excluded" in said, "never minus zero"


def test_training_without_an_interval_says_why():
    one_seed = training() | {"over_training": None, "beside_baseline": None}
    figures = world("sums", 0.5, 0.5) | {"training": one_seed}
    figures["reasons"]["training.over_training"] = "One seed has no interval."
    said = " ".join(verdict(result("Mine", {"sums": figures})))
    assert "Training in sums has no interval beside uniform credit. Sums: One seed has no interval." in said
    assert "lower baseline is" not in said


def test_a_method_that_was_not_trained_is_said_to_be_so():
    assert "It was not trained. The gain of one step does not tell what training does. Give --train" in _sums()


@pytest.mark.parametrize(
    ("passes", "tokens", "said"),
    [
        (
            1.0,
            0.0,
            "A training step takes 1.24 times the time of one with uniform credit. It adds at most 1 forward pass.",
        ),
        (2.0, 3.5, "It adds at most 2 forward passes and 3.5 sampled tokens for each token."),
        (0.0, 0.0, "the time of one with uniform credit."),
    ],
)
def test_the_cost_of_a_step(passes, tokens, said):
    cost = {"step": within(1.24, 0.02), "forward_passes": passes, "extra_tokens": tokens}
    text = _sums(cost=cost)
    assert said in text
    assert ("It adds" in text) == bool(passes or tokens)


def test_no_cost_is_no_claim():
    assert "training step takes" not in _sums(cost=None)


# The method as a whole.


def test_an_oracle_is_called_one_and_what_others_read_is_named():
    assert verdict(oracle())[0].startswith("It is an oracle. It reads the labels of steps")
    assert verdict(grail())[0] == "It reads reference answers, so compare it with methods that do so, too."
    assert "reads" not in verdict(tree())[0]


def test_uniform_credit_is_recognised_and_nothing_else_is_said():
    assert verdict(uniform()) == ["It is uniform credit: no figure differs from it in any world."]
    # The interval of an area of ties has a width, since other rollouts might have none.
    wide = uniform()
    for figures in wide["worlds"].values():
        for group in ("auroc_forks", "auroc_rollout"):
            figures[group] = {error: [0.5, 0.4, 0.6] for error in figures[group]}
    assert verdict(wide) == ["It is uniform credit: no figure differs from it in any world."]
    nearly = uniform()
    nearly["worlds"]["code"]["gain"]["adam"] = [1.0, 0.999, 1.001]
    assert "It is uniform credit" not in " ".join(verdict(nearly))
    assert "It is uniform credit" not in " ".join(verdict(references()[5])), "a score without a gain"


def test_worlds_in_which_a_method_does_not_apply_are_named():
    absent = {"search": None, "charts": None}
    same = result("Mine", {"sums": world("sums", 0.5, 0.5)} | absent, reasons=dict.fromkeys(absent, "It has no turns."))
    assert verdict(same)[-1] == "It does not apply in search and charts. It has no turns."
    other = result("Mine", absent, reasons={"search": "It has no turns.", "charts": "It has no pictures."})
    assert verdict(other) == [
        "It does not apply in search and charts. Search: It has no turns; charts: It has no pictures."
    ]


def test_the_main_claims_stand_first():
    for one in (grail(), tree(True), oracle()):
        main = [finding.main for finding in findings(one, references()) if "reads" not in finding.claim]
        assert main == sorted(main, reverse=True)
        assert sum(main) >= 2
        said = verdict(one, references())
        assert len(set(said)) == len(said)
        assert not re.search(r"\bnan\b|None|  |\.\.|-0\.0+\b|\{|\[", " ".join(said))

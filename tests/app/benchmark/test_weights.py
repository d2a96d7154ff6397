"""Weights on stored rollouts: checks, advantages, what ranks tokens, and where a method does not apply."""

from dataclasses import replace

import pytest
import torch

from grail_lightning import GroupMean
from grail_lightning.app.benchmark.references import REFERENCES
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, open_world
from grail_lightning.app.benchmark.subjects import Subject, subject_of
from grail_lightning.app.benchmark.weights import (
    DoesNotApply,
    check_applies,
    check_subject,
    reads_rewards,
    under_control,
    weigh,
)
from grail_lightning.core.functional.advantages import group_advantages
from grail_lightning.credit import GRAIL, PRIME, RLSD, Balanced, HighEntropy, Oracle, Shuffled, TreeAdvantage, Uniform
from tests.app.benchmark import methods
from tests.tolerance import assert_near


@pytest.fixture(scope="module")
def sums():
    with open_world("sums", 2) as opened:
        yield opened


def ours(method, **more):
    return Subject(name="ours", method=method, **more)


WRONG = {
    methods.WrongShape: r"`WrongShape` must return `values` as a floating-point tensor of shape .*, but got",
    methods.NotANumber: r"`NotANumber` must return finite `values`, but got",
    methods.Nothing: r"`Nothing` must return a `TokenWeights`, but got NoneType",
    methods.Fails: r"`Fails` must return weights for the rollouts of sums of five terms, but raised AttributeError",
}


@pytest.mark.parametrize("method", WRONG)
def test_a_method_that_returns_what_it_must_not_is_one_line_before_anything_runs(sums, method):
    with pytest.raises(ValueError, match=WRONG[method]) as caught:
        check_subject(ours(method()), sums)
    assert "\n" not in str(caught.value)


def test_uniform_credit_is_the_advantage_of_the_rollout(sums):
    found = weigh(ours(Uniform()), sums)
    assert found.by == "weight"
    for one, graded in zip(found.batches, sums.batches, strict=True):
        expected = group_advantages(graded.rewards, GROUP_SIZE).float()
        assert torch.equal(one.advantages, expected[:, None] * graded.response_mask)
        live = (expected[:, None] != 0) & graded.response_mask
        assert torch.equal(one.effective, live.double())


def test_a_constant_is_exactly_uniform(sums):
    uniform, constant = (weigh(ours(method), sums).batches for method in (Uniform(), methods.Constant()))
    for one, other in zip(uniform, constant, strict=True):
        assert torch.equal(one.advantages, other.advantages)


def test_effective_weights_count_from_uniform_credit_whatever_the_estimator(sums):
    half = weigh(ours(Uniform(), advantage=GroupMean(share=0.5)), sums).batches[0]
    rewards = half.batch.rewards
    mean = rewards.reshape(-1, GROUP_SIZE).mean(1).repeat_interleave(GROUP_SIZE)
    expected = ((rewards - mean / 2) / (rewards - mean)).where(rewards != mean, 0)
    assert_near(half.effective[:, 0], expected, 8, torch.float32)


def test_controls_and_balance_are_those_of_training(sums):
    found = weigh(ours(TreeAdvantage(), control=Balanced()), sums).batches[0]
    uniform = weigh(ours(Uniform()), sums).batches[0]
    for rows in (found.batch.correct, ~found.batch.correct):
        assert_near(found.advantages[rows].sum(), uniform.advantages[rows].sum(), 1000, torch.float32)
    shuffled = weigh(ours(GRAIL(), control=Shuffled()), sums)
    plain = weigh(ours(GRAIL()), sums)
    assert shuffled.by == "weight"
    ordered = [one.batches[0].weights.values.sort(1).values for one in (shuffled, plain)]
    assert torch.equal(*ordered)
    again = under_control(plain, Shuffled(), sums)
    assert torch.equal(again.batches[0].advantages, shuffled.batches[0].advantages)
    assert torch.equal(again.batches[0].ranks, shuffled.batches[0].ranks)


def test_tokens_are_ranked_by_scores_where_weights_rise_with_them(sums):
    assert weigh(ours(GRAIL()), sums).by == "score"
    assert weigh(ours(HighEntropy()), sums).by == "weight"
    assert weigh(ours(methods.Opposite()), sums).by == "weight"
    assert weigh(REFERENCES["-log p"].subject(), sums).by == "score"


def test_a_method_begins_anew_in_each_world_and_the_same_call_gives_the_same_weights(sums):
    subject = ours(methods.Counts())
    for _ in range(2):
        found = weigh(subject, sums)
        assert [float(one.weights.values.max()) for one in found.batches] == [1.0, 2.0]
    one, other = (weigh(ours(GRAIL(), control=Shuffled()), sums, seed=3).batches for _ in range(2))
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(one, other, strict=True))
    another = weigh(ours(GRAIL(), control=Shuffled()), sums, seed=4).batches
    assert not torch.equal(one[0].advantages, another[0].advantages)


def test_a_second_model_is_trained_on_further_stored_rollouts_before(sums, monkeypatch):
    from grail_lightning.app.benchmark import weights

    monkeypatch.setattr(weights, "WARM_UP", 3)
    prime = PRIME(accuracy=(0.01, 0.99), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0))
    found = weigh(ours(prime), sums)
    assert found.by == "weight"
    # Before its first step the model is the reference, and all log-ratios are 0.
    assert found.batches[0].weights.scores.any()
    assert found.reads == ()


def test_a_frozen_reference_and_reference_answers_are_there(sums):
    found = weigh(ours(RLSD(refresh_steps=1)), sums)
    assert found.reads == ("reference answers",)
    assert not found.oracle


@pytest.mark.parametrize("name", ["GiGPO", "TurnRewards", "IGPO", "CriticSearch", "EGCA", "TreeAdvantage, state=turns"])
def test_methods_of_other_worlds_do_not_apply(sums, name):
    with pytest.raises(DoesNotApply) as caught:
        weigh(REFERENCES[name].subject(), sums)
    assert str(caught.value).endswith(".")


def test_methods_of_chains_do_not_apply_to_turns():
    with open_world("search", 1) as search:
        for subject in (subject_of("Resampled"), ours(TreeAdvantage(state="numbers")), ours(Oracle())):
            with pytest.raises(DoesNotApply):
                check_applies(subject, search)
        found = weigh(ours(TreeAdvantage(state="turns")), search)
        assert found.batches[0].effective.isfinite().all()


def test_whether_a_method_reads_rewards(sums):
    assert reads_rewards(ours(TreeAdvantage()), sums)
    assert not reads_rewards(ours(GRAIL()), sums)
    assert not reads_rewards(replace(REFERENCES["entropy"].subject()), sums)


def test_the_world_of_code_needs_no_sandbox_and_methods_that_run_programs_say_so(monkeypatch):
    from grail_lightning.worlds.programs import probe

    monkeypatch.setattr(probe, "refusal", lambda isolation: "there is none")
    with open_world("code", 1) as code:
        assert weigh(ours(TreeAdvantage()), code).batches[0].effective.any()
        with pytest.raises(DoesNotApply, match=r"The method runs programs\. Nothing isolates programs here"):
            weigh(subject_of("EGCA"), code)

"""Schedules, products and permuted rewards of methods, and controls of their weights."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from grail_lightning.core.credit.service import listed
from grail_lightning.credit import (
    GRAIL,
    PRIME,
    RLSD,
    AnswerOnly,
    FrozenReference,
    OptimalBaseline,
    PermutedRewards,
    Random,
    SaliencyOptions,
    SameMagnitude,
    Shuffled,
    TokenCredit,
    TrainedModel,
    TreeAdvantage,
    TurnRewards,
    Uniform,
)
from grail_lightning.functional import mean_one
from tests.core.credit.episodes import Row, played
from tests.core.credit.rollouts import context


class _Seen(TokenCredit):
    """Uniform, and what it was given."""

    def __call__(self, policy, batch, context):
        self.rewards, self.correct = batch.rewards, batch.correct
        return Uniform()(policy, batch, context)


@pytest.mark.parametrize("mirrored", [False, True])
def test_permuted_rewards_are_those_of_the_group_in_another_order(mirrored, golden_policy, batch):
    batch = batch.replace(rewards=torch.arange(6.0), correct=torch.arange(6) % 3 == 0)
    orders, sides = set(), set()
    for seed in range(20):
        inner = _Seen()
        PermutedRewards(inner, mirrored)(golden_policy, batch, context(seed=seed))
        orders.add(tuple(inner.rewards.tolist()))
        for rows, ends in ((slice(0, 3), 0 + 2), (slice(3, 6), 3 + 5)):
            as_given = _pairs(batch.rewards[rows], batch.correct[rows])
            exchanged = _pairs(ends - batch.rewards[rows], ~batch.correct[rows])
            found = _pairs(inner.rewards[rows], inner.correct[rows])
            assert found in (as_given, exchanged), "a reward and its verdict stay together, in their group"
            sides.add(found == as_given)
    assert len(orders) > 5
    assert sides == ({True, False} if mirrored else {True})
    assert torch.equal(batch.rewards, torch.arange(6.0)), "the batch itself stays as it is"


def _pairs(rewards, correct):
    return sorted(zip(rewards.tolist(), correct.tolist(), strict=True))


def test_permuted_rewards_use_what_the_inner_method_uses():
    anew, prime = GRAIL(saliency=SaliencyOptions(refresh="step")), PRIME()
    assert PermutedRewards(GRAIL()).refresh == "batch"
    assert PermutedRewards(anew).refresh == "step"
    assert listed([PermutedRewards(prime)]) == {FrozenReference: prime, TrainedModel: prime}
    assert GRAIL().fuses
    assert not PermutedRewards(GRAIL()).fuses
    assert PermutedRewards(prime).replaces_advantage
    assert not PermutedRewards(TreeAdvantage()).replaces_advantage
    assert PermutedRewards(TreeAdvantage(advantage=False)).replaces_advantage


def test_a_method_whose_whole_advantage_is_made_of_rewards_has_no_permuted_control(golden_policy, batch):
    with pytest.warns(UserWarning, match="`PermutedRewards` permutes the whole advantage of `OptimalBaseline`"):
        PermutedRewards(OptimalBaseline())(golden_policy, batch, context())


_context = partial(context, seed=3)


@pytest.fixture
def treated(golden_policy, golden_batch):
    return GRAIL(gate="all")(golden_policy, golden_batch, _context())


def _free(batch):
    return batch.response_mask & ~batch.answer.whole & ~batch.answer.after


def test_shuffling_keeps_each_rows_histogram_and_every_control_the_answer(treated, golden_batch):
    before, free = torch.get_rng_state(), _free(golden_batch)
    shuffled = Shuffled()(treated, golden_batch, _context()).values
    alone = AnswerOnly()(treated, golden_batch, _context()).values
    assert torch.equal(before, torch.get_rng_state())
    assert (alone[free] == 1).all()
    assert torch.equal(alone[~free], treated.values[~free])
    assert torch.equal(shuffled[~free], treated.values[~free])
    for row in range(len(golden_batch)):
        assert torch.equal(shuffled[row][free[row]].sort().values, treated.values[row][free[row]].sort().values)
    assert (shuffled != treated.values).sum() > 200
    assert not torch.equal(shuffled, Shuffled()(treated, golden_batch, _context(seed=4)).values)


def test_an_additive_stage_is_permuted_with_the_weights_or_taken_away(treated, golden_batch):
    free = _free(golden_batch)
    added = replace(treated, additive=treated.values - 1.0 * golden_batch.response_mask)
    shuffled = Shuffled()(added, golden_batch, _context())
    assert torch.equal(shuffled.values, Shuffled()(treated, golden_batch, _context()).values)
    assert torch.equal(shuffled.additive, shuffled.values - 1.0 * golden_batch.response_mask)
    for control in (Random(), AnswerOnly()):
        found = control(added, golden_batch, _context()).additive
        assert (found[free] == 0).all()
        assert torch.equal(found[~free], added.additive[~free])
    uniform = replace(added, values=golden_batch.response_mask.to(added.values))
    drawn = Random()(uniform, golden_batch, _context()).values
    assert torch.equal(drawn, Random()(treated, golden_batch, _context()).values.where(free, uniform.values))


@pytest.mark.parametrize("control", [AnswerOnly(), Random(), Shuffled()])
def test_controls_of_weights_of_mean_one_have_the_mean_one(control, golden_policy, golden_batch):
    """They are those of the method without the scale, scaled alike: the answer keeps its weight beside the others."""
    scaled = control(
        GRAIL(gate="all", normalise="mean_one")(golden_policy, golden_batch, _context()), golden_batch, _context()
    )
    plain = control(GRAIL(gate="all")(golden_policy, golden_batch, _context()), golden_batch, _context())
    torch.testing.assert_close(scaled.values, mean_one(plain.values, golden_batch.response_mask))
    assert not torch.equal(scaled.values, plain.values)


def test_random_leaves_alone_what_a_method_credits_alike(golden_policy):
    """A rollout of one turn whose whole advantage is added: taken away, it would not be trained at all."""
    batch = played([Row(1.0, [[11, 12]], scores=[1.0]), Row(0.0, [[13], [14]], [[9]], scores=[1.0, 0.0])])
    weights = TurnRewards()(golden_policy, batch, context())
    found = Random()(weights, batch, context())
    assert torch.equal(found.additive[0], weights.additive[0])
    assert weights.additive[0].any()
    assert (found.additive[1] == 0).all()
    assert found.values[1].any()


def test_random_weights_have_grails_clamps_and_no_memory_of_the_scores(treated, golden_batch):
    free = _free(golden_batch)
    drawn = Random()(treated, golden_batch, _context()).values
    assert not torch.equal(drawn, Random()(treated, golden_batch, _context(seed=4)).values)
    rows = torch.arange(6) != 4  # row 4 has no box: GRAIL left it uniform, and so does its control
    assert (drawn[4] == treated.values[4]).all()
    values = drawn[free & rows[:, None]]
    assert values.min() == 0.5
    assert values.max() <= 5.0
    # A normal(1, 0.5) clamped from below at 0.5 has mean 1 + 0.5·(φ(1) − Φ(−1)·1) = 1 + 0.5·(0.2420 − 0.1587) = 1.0417
    assert values.mean().item() == pytest.approx(1.0417, abs=0.06)


@pytest.mark.parametrize("control", [Shuffled(), AnswerOnly()])
def test_a_control_keeps_the_answer_that_the_method_saw(control, golden_policy, golden_batch, monkeypatch):
    """With the first box explained, it is the first box whose overwrite stays."""
    answer = golden_batch.answer
    moved = replace(answer, whole=answer.whole.roll(-8, 1))
    located = replace(GRAIL(gate="all")(golden_policy, golden_batch, _context()), answer=moved)
    monkeypatch.setattr(GRAIL, "weights_from", lambda *_: located)
    treated = GRAIL()(golden_policy, golden_batch, _context())
    kept = control(treated, golden_batch, _context()).values
    assert torch.equal(kept[moved.whole], treated.values[moved.whole])
    only_last = answer.whole & ~moved.whole & ~answer.after
    assert not torch.equal(kept[only_last], treated.values[only_last])


def test_the_same_magnitude_has_the_mean_absolute_advantage_of_uniform_credit(treated, golden_batch):
    """One factor scales weights and additive stage alike."""
    mask, advantages = golden_batch.response_mask, golden_batch.advantages[:, None]
    still = golden_batch.replace(advantages=torch.zeros_like(golden_batch.advantages))
    assert SameMagnitude()(treated, still, _context()) is treated, "nothing stays nothing"
    weights = replace(treated, additive=(0.5 - torch.rand(treated.values.shape)) * mask)
    scaled = SameMagnitude()(weights, golden_batch, _context())
    total = (advantages * scaled.values + scaled.additive).abs().sum().item()
    assert total == pytest.approx((advantages * mask).abs().sum().item(), rel=1e-5)
    factors = (scaled.values / weights.values)[mask & (weights.values > 0)]
    assert factors.min().item() == pytest.approx(factors.max().item(), rel=1e-5)
    assert abs(factors.mean().item() - 1) > 0.01, "without the control the magnitude is another one"
    assert torch.allclose(scaled.additive, weights.additive * factors.mean())


def test_a_teacher_has_nothing_to_show_without_a_reference(golden_policy, golden_batch):
    prompts = [replace(p, reference="2" * (k % 2)) for k, p in enumerate(golden_batch.prompts)]
    weights = RLSD(refresh_steps=1)(golden_policy, golden_batch.replace(prompts=prompts), _context())
    without = torch.arange(6) % 2 == 0
    assert torch.equal(weights.fallback, without & (golden_batch.advantages != 0))
    assert (weights.values[without] == golden_batch.response_mask[without]).all()

"""Schedules and products of methods, and their names on the command line."""

import pytest
import torch

from grail_lightning.credit import (
    DGPO,
    GRAIL,
    PRIME,
    UCAS,
    AdvantageReweighting,
    Needs,
    OptimalBaseline,
    PermutedRewards,
    Product,
    Resampled,
    SaliencyOptions,
    TokenCredit,
    Uniform,
    WarmUp,
)
from tests.credit.rollouts import context
from tests.tolerance import assert_near


def test_warming_up_goes_from_uniform_to_full_strength(golden_policy, batch):
    inner = UCAS()(golden_policy, batch, context())
    for step, strength in ((0, 0.0), (3, 0.3), (10, 1.0), (99, 1.0)):
        found = WarmUp(UCAS(), steps=10)(golden_policy, batch, context(step=step))
        assert_near(found.values, batch.response_mask * (1 + strength * (inner.values - 1)), 100)
        assert_near(found.additive, strength * inner.additive, 100)


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


def test_composed_methods_need_what_their_parts_need():
    anew, prime = GRAIL(saliency=SaliencyOptions(refresh="update")), PRIME()
    for composed in (WarmUp, PermutedRewards, lambda inner: Product(inner, UCAS()), lambda i: Product(Uniform(), i)):
        assert composed(GRAIL()).needs().refresh == "rollout"
        assert composed(DGPO()).needs().reference
        assert composed(Resampled()).needs().continuations
        assert composed(prime).needs().training is prime.needs().training
        assert (composed(GRAIL()).needs().saliency is None) == (composed is not WarmUp)
    for composed in (WarmUp, PermutedRewards, lambda inner: Product(inner, inner)):
        assert composed(anew).needs().refresh == "update"
    assert Product(Uniform(), Uniform()).needs() == Needs()


def test_a_product_multiplies_weights_and_adds_what_is_additive(golden_policy, batch):
    grail, reweighted, ucas = GRAIL(gate="all"), AdvantageReweighting(), UCAS()
    one, two, three = (credit(golden_policy, batch, context()) for credit in (grail, reweighted, ucas))
    found = Product(Product(grail, reweighted), ucas)(golden_policy, batch, context())
    assert_near(found.values, one.values * two.values * three.values, 100)
    assert torch.equal(found.additive, three.additive)
    doubled = Product(ucas, ucas)(golden_policy, batch, context())
    torch.testing.assert_close(doubled.additive, 2 * three.additive)
    assert Product(grail, reweighted)(golden_policy, batch, context()).additive is None
    assert torch.equal(found.fallback, one.fallback)
    assert found.fallback.any()
    assert found.metrics["first/first/eligible"] == one.metrics["eligible"]
    with pytest.warns(UserWarning, match=r"those of `OptimalBaseline` are all 0, .* the other method has no effect"):
        Product(grail, OptimalBaseline())(golden_policy, batch, context())


def test_a_method_whose_whole_advantage_is_made_of_rewards_has_no_permuted_control(golden_policy, batch):
    with pytest.warns(UserWarning, match="`PermutedRewards` permutes the whole advantage of `OptimalBaseline`"):
        PermutedRewards(OptimalBaseline())(golden_policy, batch, context())

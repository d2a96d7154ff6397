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
from tests.credit.rollouts import context, in_groups
from tests.tolerance import near


def test_warming_up_goes_from_uniform_to_full_strength(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    inner = UCAS()(golden_policy, batch, context())
    for step, strength in ((0, 0.0), (3, 0.3), (10, 1.0), (99, 1.0)):
        found = WarmUp(UCAS(), steps=10)(golden_policy, batch, context(step=step))
        for row in range(6):
            for t in range(int(batch.response_lengths[row])):
                w, a = inner.values[row, t].item(), inner.additive[row, t].item()
                assert found.values[row, t].item() == near(1 + strength * (w - 1), 1000)
                assert found.additive[row, t].item() == near(strength * a, 1000)
        assert (found.values[~batch.response_mask] == 0).all()


class _Seen(TokenCredit):
    """Uniform, and what it was given."""

    def __call__(self, policy, batch, context):
        self.rewards, self.correct = batch.rewards, batch.correct
        return Uniform()(policy, batch, context)


@pytest.mark.parametrize("mirrored", [False, True])
def test_permuted_rewards_are_those_of_the_group_in_another_order(mirrored, golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    batch = batch.replace(rewards=torch.arange(len(batch)).float(), correct=torch.arange(len(batch)) % 3 == 0)
    orders, sides = set(), set()
    for seed in range(20):
        inner = _Seen()
        PermutedRewards(inner, mirrored)(golden_policy, batch, context(seed=seed))
        orders.add(tuple(inner.rewards.tolist()))
        for group in batch.group.unique().tolist():
            rows = batch.group == group
            ends = batch.rewards[rows].min() + batch.rewards[rows].max()
            as_given = _pairs(batch.rewards[rows], batch.correct[rows])
            exchanged = _pairs(ends - batch.rewards[rows], ~batch.correct[rows])
            found = _pairs(inner.rewards[rows], inner.correct[rows])
            assert found in (as_given, exchanged), "a reward and its verdict stay together, in their group"
            sides.add(found == as_given)
    assert len(orders) > 5
    assert sides == ({True, False} if mirrored else {True})
    assert torch.equal(batch.rewards, torch.arange(len(batch)).float()), "the batch itself stays as it is"


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


def test_a_product_multiplies_weights_and_adds_what_is_additive(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    grail, reweighted, ucas = GRAIL(gate="all"), AdvantageReweighting(), UCAS()
    one, two, three = (credit(golden_policy, batch, context()) for credit in (grail, reweighted, ucas))
    found = Product(Product(grail, reweighted), ucas)(golden_policy, batch, context())
    for row, t in ((0, 0), (1, 5), (3, 100), (5, 140)):
        product = one.values[row, t].item() * two.values[row, t].item() * three.values[row, t].item()
        assert found.values[row, t].item() == near(product, 1000)
    assert torch.equal(found.additive, three.additive)
    doubled = Product(ucas, ucas)(golden_policy, batch, context())
    torch.testing.assert_close(doubled.additive, 2 * three.additive)
    assert Product(grail, reweighted)(golden_policy, batch, context()).additive is None
    assert torch.equal(found.fallback, one.fallback)
    assert found.fallback.any()
    assert found.metrics["first/first/eligible"] == one.metrics["eligible"]
    with pytest.warns(UserWarning, match=r"those of `OptimalBaseline` are all 0, .* the other method has no effect"):
        Product(grail, OptimalBaseline())(golden_policy, batch, context())


def test_a_method_whose_whole_advantage_is_made_of_rewards_has_no_permuted_control(golden_policy, golden_batch):
    with pytest.warns(UserWarning, match="`PermutedRewards` permutes the whole advantage of `OptimalBaseline`"):
        PermutedRewards(OptimalBaseline())(golden_policy, golden_batch, context())

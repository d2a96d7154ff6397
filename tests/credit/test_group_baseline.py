"""The share of the group's mean that is subtracted, the pooled baseline of least noise, and controls beside them."""

from dataclasses import replace

import pytest
import torch

from grail_lightning.credit import Balanced, CreditContext, OptimalBaseline, RandomSubset, TokenWeights, Uniform
from grail_lightning.credit.measure import gradient_energies
from grail_lightning.functional import group_advantages
from grail_lightning.functional.advantages import energy_baselines
from grail_lightning.step.advantages import token_advantages, with_advantages
from grail_lightning.step.options import Objective
from tests.batches import graded
from tests.runs import Watch, batches, module, one_in_four, trainer

REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0])


def _context(budget=600):
    return CreditContext(step=0, generator=torch.Generator().manual_seed(3), token_budget=budget)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_share_of_the_mean_is_subtracted_and_equal_groups_are_left_out(share):
    found = group_advantages(REWARDS, 4, baseline=share)
    for k, mean in enumerate([0.25, 1.0, 0.0, 0.5]):
        rows = slice(4 * k, 4 * k + 4)
        wanted = REWARDS[rows] - share * mean if 0 < mean < 1 else torch.zeros(4)
        assert torch.equal(found[rows], wanted)


def test_groups_with_equal_rewards_are_trained_on_if_asked_and_only_where_the_baseline_differs():
    found = group_advantages(REWARDS, 4, baseline=0.25, train_equal=True)
    assert torch.equal(found[4:8], torch.full((4,), 0.75))
    assert torch.equal(found[8:12], torch.zeros(4))
    assert torch.equal(group_advantages(REWARDS, 4, train_equal=True), group_advantages(REWARDS, 4))


def test_negative_rewards_are_blamed_without_a_baseline_since_it_depends_on_where_zero_is():
    assert torch.equal(
        group_advantages(torch.tensor([1.0, -1, -1, 0.5]), 4, baseline=0.0), torch.tensor([1, -1, -1, 0.5])
    )


@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_the_energy_baseline_of_right_and_wrong_rows_is_the_closed_form(ratio):
    energies = torch.where(REWARDS > 0.5, ratio, 1.0) * 7
    found = energy_baselines(REWARDS, 4, REWARDS, energies)
    p = REWARDS.reshape(-1, 4).mean(1).double()
    torch.testing.assert_close(found, p * ratio / (p * ratio + 1 - p), rtol=1e-12, atol=0)


def test_the_energy_baseline_has_the_least_noise_when_energy_depends_on_the_reward_alone():
    rewards = torch.tensor([1.0, 0.5, 0.0, 0.0])
    energies = torch.tensor([1.0, 2.0, 4.0, 4.0], dtype=torch.float64)
    best = energy_baselines(rewards, 4, rewards, energies)[0]

    def noise(baseline):
        return float(((rewards - baseline).square() * energies).sum())

    assert noise(best) < min(noise(best - 0.01), noise(best + 0.01))


def test_rewards_that_are_not_pooled_get_the_mean():
    nothing = torch.zeros(0)
    assert torch.equal(energy_baselines(REWARDS, 4, nothing, nothing), REWARDS.double().reshape(-1, 4).mean(1))


def test_a_run_pools_the_energies_of_the_rows_of_all_mixed_groups(golden_policy, golden_batch):
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    batch = graded(golden_batch, rewards, group=torch.tensor([0, 0, 1, 1, 2, 2]))
    found = with_advantages(batch, 2, Objective(baseline="energy"), golden_policy, _context())
    energy = gradient_energies(golden_policy, batch, _context(), torch.arange(6)).sum(1)
    baseline = float(energy[0] / (energy[0] + energy[1]))
    torch.testing.assert_close(found.advantages[:2], torch.tensor([1 - baseline, -baseline]))
    assert torch.equal(found.advantages[2:], torch.zeros(4))


def test_energies_are_squared_gradient_norms_by_autograd(golden_policy, golden_batch):
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    for row, token in zip(logits, [0, 3, 6, 2, 2], strict=True):
        pi = row.detach().softmax(-1)
        (gradient,) = torch.autograd.grad(row.log_softmax(-1)[token], logits)
        assert float(gradient.square().sum()) == pytest.approx(float(1 - 2 * pi[token] + pi.square().sum()))
    energy = gradient_energies(golden_policy, golden_batch, _context(), torch.tensor([0, 2]))
    assert (energy[[0, 2]][golden_batch.response_mask[[0, 2]]] > 0).all()
    assert (energy[[1, 3, 4, 5]] == 0).all()


@pytest.mark.parametrize("baseline", [0.0, 0.5, "energy"])
def test_every_baseline_trains(baseline):
    watch = Watch()
    trainer(2, watch).fit(module({"baseline": baseline, "group_size": 8}), batches(2, size=4))
    for output in watch.outputs:
        batch = output.batch
        mixed = torch.isin(batch.group, batch.group[batch.rewards == 1]) & torch.isin(
            batch.group, batch.group[batch.rewards == 0]
        )
        assert mixed.any()
        right = mixed & batch.correct
        assert (batch.advantages[right] > 0).all()
        assert torch.equal(
            batch.advantages[mixed & ~batch.correct] < 0,
            torch.full((int((mixed & ~batch.correct).sum()),), baseline != 0.0),
        )
        assert (batch.advantages[~mixed] == 0).all()


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_share_outside_of_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"`objective.baseline` must lie in \[0, 1\] or be energy"):
        Objective(baseline=value)


# --- controls ---------------------------------------------------------------------------------------------------------


def _sums(batch, weights):
    advantages = token_advantages(batch.advantages, weights).double().sum(1)
    return float(advantages[batch.correct].sum()), float(advantages[~batch.correct].sum())


def test_balanced_restores_the_sums_of_uniform_credit_and_keeps_the_proportions(packaged):
    batch, policy = packaged
    weights = OptimalBaseline()(policy, batch, _context())
    found = Balanced()(weights, batch, _context())
    assert _sums(batch, found) == pytest.approx(_sums(batch, Uniform()(policy, batch, _context())), rel=1e-5)
    assert _sums(batch, weights) != pytest.approx(_sums(batch, found), rel=1e-2)
    assert found.metrics["unbalanced"] == 0
    for rows in (batch.correct, ~batch.correct):
        ratio = (found.additive / weights.additive)[rows & (batch.advantages != 0)]
        assert ratio.nan_to_num(nan=float(ratio.nanmean())).std() < 1e-5


def test_balanced_leaves_a_sum_of_the_other_sign_and_counts_it(packaged):
    batch, _ = packaged
    mask = batch.response_mask.float()
    praised = TokenWeights(
        values=torch.zeros_like(mask), additive=mask.clone(), fallback=torch.zeros_like(batch.finished)
    )
    found = Balanced()(praised, batch, _context())
    assert found.metrics["unbalanced"] == 1
    assert torch.equal(found.additive[~batch.correct], mask[~batch.correct])
    assert _sums(batch, found)[0] == pytest.approx(
        _sums(batch, replace(praised, values=mask, additive=None))[0], rel=1e-5
    )


def test_a_random_subset_has_its_share_and_follows_the_row_not_its_place(packaged):
    batch, policy = packaged
    values = RandomSubset(0.2)(policy, batch, _context()).values
    tokens = int(batch.response_mask.sum())
    share = float(values.sum()) / tokens
    assert set(values.unique().tolist()) == {0.0, 1.0}
    assert abs(share - 0.2) < 4 * (0.16 / tokens) ** 0.5
    assert (values[~batch.response_mask] == 0).all()
    order = torch.arange(len(batch)).flip(0)
    assert torch.equal(RandomSubset(0.2)(policy, batch.select(order), _context()).values, values[order])
    assert torch.equal(RandomSubset(1.0)(policy, batch, _context()).values, batch.response_mask.float())


@pytest.fixture(scope="module")
def packaged():
    """Rollouts of the packaged policy, one of each group of four right; and the policy."""
    from grail_lightning.batch import Sampling
    from grail_lightning.policy import load_policy

    return one_in_four(4, Sampling(max_response_length=48)), load_policy("arithmetic").eval()

"""The share of the group's mean that is subtracted, the pooled baseline of least noise, and controls beside them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning import DrGRPO, EnergyBaseline, GroupMean
from grail_lightning.core.credit.base import check_weights, token_advantages
from grail_lightning.core.functional.advantages import energy_baselines
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.assign import compute_advantages
from grail_lightning.credit import Balanced, OptimalBaseline, RandomSubset, TokenWeights, Uniform
from grail_lightning.functional import group_advantages
from tests.batches import graded
from tests.core.credit.rollouts import context, row_logits
from tests.runs import SAMPLING, one_in_four

REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0])
EVERY = torch.ones(16, dtype=torch.bool)


@pytest.fixture(scope="module")
def packaged():
    """Rollouts of the packaged policy, one of each group of four right; and the policy."""
    return one_in_four(4, SAMPLING), load_policy("arithmetic").eval()


_context = partial(context, seed=3, budget=600)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_mean_is_subtracted_and_equal_groups_are_left_out(share):
    found = group_advantages(REWARDS, 4, baseline=share)
    for k, mean in enumerate([0.25, 1.0, 0.0, 0.5]):
        rows = slice(4 * k, 4 * k + 4)
        wanted = REWARDS[rows] - share * mean if 0 < mean < 1 else torch.zeros(4)
        assert torch.equal(found[rows], wanted)

    # Groups with equal rewards are trained on if asked, and only where the baseline differs.
    found = group_advantages(REWARDS, 4, baseline=share, train_equal=True)
    assert torch.equal(found, REWARDS - share * REWARDS.reshape(-1, 4).mean(1).repeat_interleave(4))


def test_rewards_that_are_not_pooled_get_the_mean_and_rows_that_are_not_counted_have_no_part():
    nothing = torch.zeros(0)
    assert torch.equal(energy_baselines(REWARDS, EVERY, 4, nothing, nothing), REWARDS.double().reshape(-1, 4).mean(1))
    rewards, energies = torch.tensor([1.0, 0, 0, 0.0]), torch.tensor([3.0, 1, 1, 50], dtype=torch.float64)
    counted = torch.tensor([True, True, True, False])
    found = energy_baselines(rewards, counted, 4, rewards[counted], energies[counted])
    assert found.item() == pytest.approx(3 / (3 + 1 + 1))


@pytest.mark.parametrize("how", ["dr_grpo", "grpo"])
def test_a_run_pools_the_energies_of_tokens_in_the_loss_over_the_mixed_groups(how, golden_policy, golden_batch):
    """By loops: two groups of three rows, one row of which was truncated, and energies by autograd on the logits."""
    rewards, finished = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.tensor([True, True, False, True, True, True])
    batch = graded(golden_batch, rewards, group=torch.tensor([0, 0, 0, 1, 1, 1]), finished=finished)
    objective = DrGRPO(aggregation=how, mask_truncated=True)
    found = compute_advantages(batch, 3, EnergyBaseline(), objective, golden_policy, _context())
    energy = []
    for row in range(6):
        logits, ids = row_logits(golden_policy, batch, row).requires_grad_(), batch.response_ids[row].long()
        logprobs = logits.log_softmax(-1).gather(1, ids[: len(logits), None])
        (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
        energy.append(float(gradient.square().sum()) / (len(logits) ** 2 if how == "grpo" else 1))
    right, wrong = sum(energy[k] for k in (0, 3, 4)) / 3, sum(energy[k] for k in (1, 5)) / 2
    expected = [right / (right + wrong), 2 * right / (2 * right + wrong)]
    for k, row in enumerate(found.advantages.tolist()):
        assert row == pytest.approx(float(rewards[k]) - expected[k // 3], rel=1e-5)


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


def test_balanced_leaves_a_sum_of_the_other_sign_or_that_has_cancelled_and_counts_it(packaged):
    batch, policy = packaged
    praise = batch.replace(advantages=batch.advantages.clamp(min=0))
    assert Balanced()(Uniform()(policy, praise, _context()), praise, _context()).metrics["unbalanced"] == 0
    mask = batch.response_mask.float()
    praised = TokenWeights(values=torch.zeros_like(mask), additive=mask)
    found = Balanced()(praised, batch, _context())
    assert found.metrics["unbalanced"] == 1
    assert torch.equal(found.additive[~batch.correct], mask[~batch.correct])
    assert _sums(batch, found)[0] == pytest.approx(_sums(batch, Uniform()(policy, batch, _context()))[0], rel=1e-5)
    signs = torch.where(torch.arange(mask.shape[1]) % 2 == 0, 1.0, -1.0) * mask
    signs = signs - mask * (signs.sum(1) / mask.sum(1))[:, None] + 1e-6 * mask  # Each row nearly cancels.
    found = Balanced()(replace(praised, additive=signs), batch, _context())
    assert torch.equal(found.additive, signs)
    assert found.metrics["unbalanced"] == 2


@pytest.mark.parametrize("name", ["OptimalBaseline", "GRAIL", "TreeAdvantage"])
def test_all_right_groups_that_are_trained_on_keep_their_uniform_advantage(name, packaged):
    """A method has nothing to compare there: no token gets more than the others, but for GRAIL's fixed weights."""
    batch, policy = packaged
    rewards = torch.tensor([1.0] * 4 + [1, 0, 0, 1] * 3)
    batch = graded(batch, rewards, tokenizer=policy.tokenizer)
    estimator = GroupMean(share=0.5, train_equal=True)
    batch = compute_advantages(batch, 4, estimator, DrGRPO(mask_truncated=True), policy, _context())
    assert torch.equal(batch.advantages[:4], torch.full((4,), 0.5))
    weights = getattr(credits, name)()(policy, batch, _context())
    check_weights(Uniform(), weights, batch)
    equal = token_advantages(batch.advantages, weights)[:4][batch.response_mask[:4] & ~batch.answer.whole[:4]]
    assert torch.equal(equal, torch.full_like(equal, 0.0 if name == "OptimalBaseline" else 0.5))


def test_a_random_subset_has_its_share(packaged):
    batch, policy = packaged
    tokens = int(batch.response_mask.sum())
    values = RandomSubset(0.2)(policy, batch, _context()).values
    assert set(values.unique().tolist()) == {0.0, 1.0}
    assert abs(float(values.sum()) / tokens - 0.2) < 4 * (0.16 / tokens) ** 0.5
    assert torch.equal(RandomSubset(1.0)(policy, batch, _context()).values, batch.response_mask.float())

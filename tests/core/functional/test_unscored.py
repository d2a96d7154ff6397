"""Advantages where some responses have no reward (NaN), and where rewards have a large offset."""

import math
import statistics

import pytest
import torch

from grail_lightning.core.functional.advantages import beta_scale, energy_baselines, group_advantages
from tests.tolerance import assert_near

NONE = math.nan
SCALES = ("none", "group", "batch", "bnpo")


def _by_hand(groups, scale, share, train_equal):
    """The advantages of lists of rewards, by loops over those that are not None."""
    everyone = [r for group in groups for r in group if r is not None]
    means = [statistics.fmean(own) for group in groups if (own := [r for r in group if r is not None])]
    found = []
    for group in groups:
        own = [r for r in group if r is not None]
        equal = len(own) < 2 or max(own) - min(own) <= 1e-6
        for r in group:
            if r is None or len(own) < 2:
                found.append(0.0)
                continue
            mean = statistics.fmean(own)
            centred = r - share * mean
            if equal and not (train_equal and abs(centred) > 1e-6):
                found.append(0.0)
                continue
            if scale == "group":
                centred /= statistics.stdev(own) + 1e-4
            elif scale == "batch":
                centred /= statistics.stdev(everyone) + 1e-4
            elif scale == "bnpo":
                alone = torch.tensor([mean], dtype=torch.float64)
                centred *= float(beta_scale(alone, torch.tensor(means, dtype=torch.float64)))
            found.append(centred)
    return torch.tensor(found, dtype=torch.float64)


def _tensor(groups):
    flat = [NONE if r is None else r for group in groups for r in group]
    return torch.tensor(flat, dtype=torch.float64)


def test_the_mean_of_a_group_is_that_of_its_scored_rows():
    """7 / 6 is the mean of 2, 1, 1, 1, 1 and 1."""
    found = group_advantages(_tensor([[None, 2, 1, 1, None, 1, 1, 1]]), 8)
    expected = [0, 2 - 7 / 6, 1 - 7 / 6, 1 - 7 / 6, 0, *[1 - 7 / 6] * 3]
    assert_near(found, torch.tensor(expected, dtype=torch.float64), 4)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("share", "train_equal"), [(1.0, False), (0.5, False), (0.0, True)])
def test_every_estimator_leaves_rows_without_a_reward_out(scale, share, train_equal):
    """Groups of every number of scored rows, from none to all, against loops over those rows."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = torch.randint(5, (6, 5), generator=draw).double() / 4
        unscored = torch.rand(6, 5, generator=draw) < torch.arange(6)[:, None] / 5
        groups = [
            [None if absent else value for value, absent in zip(*rows, strict=True)]
            for rows in zip(values.tolist(), unscored.tolist(), strict=True)
        ]
        rewards = _tensor(groups)
        known = rewards[~rewards.isnan()]
        means = rewards.reshape(6, 5).nanmean(1)
        found = group_advantages(
            rewards, 5, scale, known.std(), means[~means.isnan()], baseline=share, train_equal=train_equal
        )
        assert_near(found, _by_hand(groups, scale, share, train_equal), 64)
        assert (found[rewards.isnan()] == 0).all()


def test_the_energy_baseline_sums_over_scored_rows():
    """Two kinds of rewards with energies 1 and 3: b = Σ W r / Σ W over the three rows that count."""
    rewards = _tensor([[1, None, 0, 0], [None] * 4])
    counted = ~rewards.isnan()
    energies = torch.tensor([1.0, 3.0, 3.0], dtype=torch.float64)
    found = energy_baselines(rewards, counted, 4, rewards[counted], energies)
    assert found[0] == pytest.approx(1 / 7)
    advantages = group_advantages(rewards, 4, baseline=found)
    assert advantages.tolist() == pytest.approx([6 / 7, 0, -1 / 7, -1 / 7, 0, 0, 0, 0])


@pytest.mark.parametrize("scale", SCALES[:3])
@pytest.mark.parametrize("offset", [1e8, -1e8, 1e12])
def test_a_large_offset_of_the_rewards_changes_no_advantage(scale, offset):
    """In float32 ``1e8 + 1`` is ``1e8``. In float64 an offset of 1e12 leaves 1e-4 of a difference of 1."""
    correct = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
    plain, moved = (
        group_advantages(rewards, 4, scale, rewards.std(), dtype=torch.float32)
        for rewards in (correct, offset + correct)
    )
    assert moved.dtype == torch.float32
    assert_near(moved.double(), plain.double(), abs(offset) / 1e8 * 8, torch.float32, scale=2.0)
    assert moved.unique().numel() > 2


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_that_float32_holds_have_the_advantages_of_float32_arithmetic_in_groups_of_a_power_of_two(scale):
    """Bit for bit: means and differences of such rewards are exact in both."""
    rewards = torch.randint(5, (512,), generator=torch.Generator().manual_seed(1)).float() / 4
    groups = rewards.reshape(-1, 8)
    centred, means = groups - groups.mean(1, keepdim=True), groups.double().mean(1)
    factors = {
        "none": lambda a: a,
        "group": lambda a: a / (groups.std(1, keepdim=True) + 1e-4),
        "batch": lambda a: a / (rewards.std() + 1e-4),
        "bnpo": lambda a: a * beta_scale(means, means)[:, None].float(),
    }
    expected = factors[scale](centred)
    expected[(groups == groups[:, :1]).all(1)] = 0
    found = group_advantages(rewards.double(), 8, scale, rewards.double().std(), means, dtype=torch.float32)
    assert torch.equal(found, expected.flatten())

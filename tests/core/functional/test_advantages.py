"""Advantages by hand, and BNPO's scale against a loop with SciPy's Beta distribution."""

import math
import statistics

import pytest
import torch
from scipy.stats import beta

from grail_lightning.core.functional.advantages import beta_scale
from grail_lightning.functional import group_advantages
from tests.tolerance import near


@pytest.mark.parametrize(("scale", "std"), [("group", math.sqrt(0.5)), ("batch", 2.0)])
def test_scaling_divides_by_an_unbiased_std_plus_epsilon(scale, std):
    """Of the group, sqrt((0.25 + 0.25) / 1), or as given of the batch."""
    scaled = group_advantages(torch.tensor([1.0, 0.0]), 2, scale, batch_std=2.0)
    assert scaled.tolist() == near([0.5 / (std + 1e-4), -0.5 / (std + 1e-4)], 16, torch.float32)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_float_noise_in_equal_rewards_is_no_advantage(scale):
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3])
    assert torch.equal(group_advantages(rewards, 4, scale), torch.zeros(4))


BATCHES = {
    "uneven": [0.0, 0.125, 0.25, 0.5, 0.75, 0.75, 1.0],
    "hard": [0.0, 0.0, 0.125, 0.125, 0.25],
    "easy": [0.875, 1.0, 0.75, 1.0],
    "all or nothing": [0.0, 1.0, 0.0, 1.0, 1.0],  # v > m(1 − m): a and b are negative, α = β = 1
    "nearly equal": [0.5, 0.5, 0.5, 0.625],
    "one far out": [0.875] * 15 + [0.125],
}


def _scale(p, means):
    """Beta parameters by moments, softened by a third; the inverse density; the cap."""
    m, v = statistics.mean(means), statistics.variance(means)
    a, b = (m * (1 - m) / v - 1) * m, (m * (1 - m) / v - 1) * (1 - m)
    density = beta.pdf(p, max(1, 1 + a / 3), max(1, 1 + b / 3))
    return min(1 / density, 1e6) if density > 0 else 1e6


@pytest.mark.parametrize("name", BATCHES)
def test_the_scale_is_the_inverse_density_of_the_groups_mean(name):
    means = BATCHES[name]
    found = beta_scale(torch.tensor(means), torch.tensor(means))
    assert found.tolist() == near([_scale(p, means) for p in means], 1000)


def test_advantages_are_centred_rewards_times_the_groups_scale():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    elsewhere = [0.25, 0.25, 1.0]  # groups of another rank
    means = [statistics.mean(group) for group in rewards]
    found = group_advantages(torch.tensor(rewards).flatten(), 4, "bnpo", batch_means=torch.tensor([*means, *elsewhere]))
    expected = [
        (r - p) * _scale(p, [*means, *elsewhere]) for group, p in zip(rewards, means, strict=True) for r in group
    ]
    assert found.tolist() == near(expected, 16, torch.float32)
    assert (found[8:12] == 0).all(), "a dead group stays at exactly 0 under the largest scale"
    assert found.dtype == torch.float32


@pytest.mark.parametrize("means", [[0.3], [0.5, 0.5, 0.5], [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0], [1.0, 1.0]])
def test_one_group_or_equal_means_have_scale_one(means):
    means = torch.tensor(means, dtype=torch.float64)
    assert torch.equal(beta_scale(means, means), torch.ones(len(means), dtype=torch.float64))

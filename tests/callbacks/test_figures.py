import math

import pytest
import torch

from grail_lightning.callbacks.figures import average_interval, mean_interval


def test_the_interval_of_shares_is_a_bootstrap_over_problems():
    generator = torch.Generator().manual_seed(0)
    shares = torch.randint(0, 5, (400,), generator=generator).double() / 4
    low, high = mean_interval(shares)
    # With 400 problems the bootstrap comes close to mean ± 1.96 standard errors.
    half = 1.96 * float(shares.std()) / math.sqrt(len(shares))
    assert low == pytest.approx(float(shares.mean()) - half, abs=0.2 * half)
    assert high == pytest.approx(float(shares.mean()) + half, abs=0.2 * half)
    assert (low, high) == mean_interval(shares)


def test_nothing_right_is_not_certainty():
    low, high = mean_interval(torch.zeros(30, dtype=torch.float64))
    # Wilson at 0 of n: upper limit z²/(n + z²).
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(1.959964**2 / (30 + 1.959964**2), rel=1e-4)


def test_one_problem_half_solved_says_nothing():
    assert mean_interval(torch.tensor([0.5], dtype=torch.float64)) == (0.0, 1.0)


def test_no_problem_has_no_interval():
    assert all(math.isnan(limit) for limit in mean_interval(torch.zeros(0, dtype=torch.float64)))


def test_the_interval_of_an_average_adds_half_widths_in_quadrature():
    # Half widths 0.3 and 0.4 below, 0.03 and 0.04 above: 0.5 / 2 and 0.05 / 2 about the mean 0.5.
    low, high = average_interval([0.4, 0.6], [(0.1, 0.43), (0.2, 0.64)])
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.525)

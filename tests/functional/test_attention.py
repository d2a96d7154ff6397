"""Shares of a row's tokens, counted in exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from grail_lightning.functional.attribution import top_mass, top_share

LONGEST = 2000


@pytest.mark.parametrize("share", [0.0, 0.05, 0.07, 0.1, 0.2, 0.29, 0.3, 0.4, 0.7, 1 / 3, 1e-05, 0.999, 1.0, 1])
def test_a_share_of_the_tokens_is_that_of_the_number_as_written(share):
    """A third of ten tokens is four, but 0.3 of them is three: as fractions, at every length."""
    lengths = torch.arange(LONGEST + 1)
    mask = torch.arange(LONGEST) < lengths[:, None]
    expected = [math.ceil(Fraction(str(share)) * n) for n in range(LONGEST + 1)]
    assert top_share(torch.zeros(mask.shape), mask, share).sum(1).tolist() == expected
    if expected[-1]:  # Of equal credits the mass is the number of tokens.
        mass = top_mass(torch.ones(mask.shape), mask, share)[1:] * lengths[1:]
        assert mass.round().long().tolist() == expected[1:]


def test_the_largest_scores_are_taken_and_of_equal_ones_the_earlier():
    scores, mask = (
        torch.tensor([[1.0, 3.0, 2.0, 3.0, 9.0], [5.0] * 5]),
        torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]),
    )
    # ceil(0.5 · 4) = 2
    assert top_share(scores, mask.bool(), 0.5).int().tolist() == [[0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]

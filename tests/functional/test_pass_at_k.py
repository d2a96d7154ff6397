import math
from itertools import combinations, product

import pytest
import torch

from grail_lightning.functional import pass_at_k, pass_at_k_variance
from tests.tolerance import near


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 3), (8, 3, 1), (8, 3, 4), (5, 5, 2), (6, 2, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, torch.tensor([c]), k).item() == near(expected, 1000)


def test_fewer_samples_than_k_is_an_error():
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples a problem, but got 4"):
        pass_at_k(4, torch.tensor([1]), 8)


def test_more_right_samples_than_samples_is_an_error():
    with pytest.raises(ValueError, match="between 0 and"):
        pass_at_k(4, torch.tensor([5]), 2)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 1), (4, 2, 2), (4, 3, 4), (5, 0, 2), (5, 5, 3)])
def test_the_variance_of_pass_at_k_is_that_of_all_ways_to_draw_the_samples_again(n, c, k):
    # Oracle: each of the 2^n patterns of right and wrong, by its probability.
    patterns = list(product([0, 1], repeat=n))
    chances = [math.prod(c / n if right else 1 - c / n for right in pattern) for pattern in patterns]
    values = [pass_at_k(n, torch.tensor([sum(pattern)]), k).item() for pattern in patterns]
    mean = sum(p * v for p, v in zip(chances, values, strict=True))
    expected = sum(p * (v - mean) ** 2 for p, v in zip(chances, values, strict=True))
    # The epsilon of double precision, times the number of terms of size one at most.
    assert pass_at_k_variance(n, torch.tensor([c]), k).item() == pytest.approx(expected, abs=2**n * 2.3e-16)

from itertools import combinations

import pytest
import torch

from grail_lightning.functional import pass_at_k
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

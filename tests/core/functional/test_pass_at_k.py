import math
from itertools import combinations, product

import pytest
import torch

from grail_lightning.functional import maj_at_k, pass_at_k, pass_at_k_variance
from tests.tolerance import near


@pytest.mark.parametrize(("n", "c", "k"), [(8, 0, 3), (8, 3, 1), (8, 3, 4), (5, 5, 2), (6, 2, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, torch.tensor([c]), k).item() == near(expected, 1000)


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


@pytest.mark.parametrize("count", [-1, 5])
def test_counts_out_of_range_have_no_variance(count):
    with pytest.raises(ValueError, match="`num_correct` must lie between 0 and `num_samples`"):
        pass_at_k_variance(4, torch.tensor([count]), 1)


def _enumerated(votes, correct, k):
    """The vote in every subset of k samples, with ties shared."""
    total = 0
    for subset in combinations(range(len(votes)), k):
        answers = [votes[i] for i in subset if votes[i] >= 0]
        if not answers:
            continue
        most = max(map(answers.count, answers))
        winners = {answer for answer in answers if answers.count(answer) == most}
        shares = []
        for winner in winners:
            rows = [is_right for vote, is_right in zip(votes, correct, strict=True) if vote == winner]
            shares.append(sum(rows) / len(rows))
        total += sum(shares) / len(winners)
    return total / len(list(combinations(range(len(votes)), k)))


def test_votes_with_any_verdicts_are_those_of_an_enumeration():
    for samples in product(((-1, False), (0, True), (0, False), (1, False), (2, True)), repeat=4):
        votes, correct = zip(*samples, strict=True)
        for k in (1, 2, 3, 4):
            assert maj_at_k(votes, correct, k) == pytest.approx(_enumerated(votes, correct, k), rel=1e-12, abs=1e-12)


def test_a_vote_of_many_samples_and_answers_takes_no_enumeration():
    votes = [n % 40 for n in range(64)]  # C(64, 32) subsets
    found = maj_at_k(votes, [vote == 0 for vote in votes], 32)
    assert 0 < found < 0.2

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grail_lightning.functional import maj_at_k


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


def test_all_votes_of_four_samples_are_those_of_an_enumeration():
    for votes in product((-1, 0, 1, 2), repeat=4):
        for right in (0, 1):
            correct = [vote == right for vote in votes]
            for k in (1, 2, 3, 4):
                assert maj_at_k(votes, correct, k) == pytest.approx(_enumerated(votes, correct, k), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 4), st.booleans()), min_size=1, max_size=9), st.integers(1, 9))
def test_any_votes_with_any_verdicts_are_those_of_an_enumeration(samples, k):
    votes, correct = zip(*samples, strict=True)
    k = min(k, len(votes))
    assert maj_at_k(votes, correct, k) == pytest.approx(_enumerated(votes, correct, k), rel=1e-12, abs=1e-12)


def test_one_vote_is_the_share_of_right_samples_that_answer():
    assert maj_at_k([0, 1, -1, 0], [True, False, False, True], 1) == 0.5


def test_a_vote_of_many_samples_and_answers_takes_no_enumeration():
    votes = [n % 40 for n in range(64)]  # C(64, 32) subsets
    found = maj_at_k(votes, [vote == 0 for vote in votes], 32)
    assert 0 < found < 0.2


@pytest.mark.parametrize(("k", "message"), [(0, "`k` must be at least 1"), (3, "maj@3 needs at least 3 samples")])
def test_impossible_k_are_refused(k, message):
    with pytest.raises(ValueError, match=message):
        maj_at_k([0, 1], [True, False], k)

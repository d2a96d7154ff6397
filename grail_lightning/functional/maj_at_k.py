"""The unbiased maj@k estimator: a majority vote over k samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb


def maj_at_k(votes: Sequence[int], correct: Sequence[bool], k: int) -> float:
    r"""Probability that a majority vote over `k` of a problem's ``n`` samples is right, an unbiased estimate.

    It is the mean over all :math:`\binom{n}{k}` subsets of the samples. In each of them the answer with most votes
    wins; answers with equally many votes win with equal probability. Samples without an answer do not vote, and a vote
    without a voter is wrong. An answer counts as right by the share of its samples that are right, which is 0 or 1
    unless equal answers got different verdicts. The subsets are not enumerated: for an answer with :math:`x` votes the
    number of subsets in which all others have at most :math:`x`, and :math:`t` of them as many, is a coefficient of a
    product of polynomials. All numbers are whole, so the result is exact.

    Args:
        votes: ``n`` numbers: equal ones for equal answers, negative ones for samples without an answer.
        correct: ``n`` values, the right samples.
        k: The number of samples that vote.

    Raises:
        ValueError: If ``k < 1``, or the problem has fewer than `k` samples.

    Source: the vote is self-consistency (Wang et al., arXiv 2203.11171); the estimate over subsets is ours.

    >>> maj_at_k([0, 0, 1], [True, True, False], k=3)
    1.0
    >>> maj_at_k([0, 0, 1], [True, True, False], k=2)  # of three pairs one is right, two are drawn
    0.6666666666666666
    """
    number = len(votes)
    if k < 1:
        raise ValueError(f"`k` must be at least 1, but got {k}.")
    if number < k:
        raise ValueError(f"maj@{k} needs at least {k} samples a problem, but got {number}. Draw more samples.")
    counts = Counter(vote for vote in votes if vote >= 0)
    silent = number - sum(counts.values())
    right = Counter(vote for vote, is_right in zip(votes, correct, strict=True) if is_right and vote >= 0)
    won = Fraction(0)
    for answer, share in right.items():
        others = [count for other, count in counts.items() if other != answer]
        wins = sum(
            (comb(counts[answer], x) * _ways(others, silent, x, k - x) for x in range(1, min(counts[answer], k) + 1)),
            Fraction(0),
        )
        won += Fraction(share, counts[answer]) * wins
    return float(won / comb(number, k))


def _ways(others: Sequence[int], silent: int, most: int, room: int) -> Fraction:
    """The ways to draw `room` further samples without an answer of more than `most` votes.

    A way with ``t`` answers of exactly `most` votes counts as ``1 / (t + 1)``: one of them wins.

    Args:
        others: The number of samples of each other answer.
        silent: The number of samples without an answer.
        most: The votes of the answer that is to win.
        room: The number of samples to draw.
    """
    ways = {(0, 0): 1}  # (samples drawn, answers with `most` votes) -> number of ways
    for count in others:
        more: Counter[tuple[int, int]] = Counter()
        for (drawn, ties), number in ways.items():
            for votes in range(min(count, most, room - drawn) + 1):
                more[drawn + votes, ties + (votes == most)] += number * comb(count, votes)
        ways = more
    return sum(
        (Fraction(number * comb(silent, room - drawn), ties + 1) for (drawn, ties), number in ways.items()), Fraction(0)
    )

"""Unbiased estimates over k of n samples: that one of them is right (pass@k), that their majority is (maj@k)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import comb

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor, k: int) -> Tensor:
    r"""Probability that at least one of `k` samples is right, an unbiased estimate from ``n ≥ k`` samples.

    .. math:: 1 - \binom{n - c}{k} / \binom{n}{k}

    Computed as a product of ratios, which cannot overflow.

    From ``n`` samples of each problem (``[N]``, or one number for all) and ``c`` right ones ``[N]`` to ``[N]`` float64.
    It is a ValueError if ``k < 1``, a problem has fewer than `k` samples, or ``c`` is not in ``[0, n]``.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, section 2.1.

    >>> pass_at_k(4, torch.tensor([0, 1, 4]), k=2)
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    n = torch.as_tensor(num_samples, dtype=torch.float64, device=num_correct.device).expand(num_correct.shape)
    c = num_correct.to(torch.float64)
    if k < 1:
        raise ValueError(f"`k` must be at least 1, but got {k}.")
    if (n < k).any():
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, but got {int(n.min())}. Draw more samples.")
    if (c < 0).any() or (c > n).any():
        raise ValueError("`num_correct` must lie between 0 and `num_samples`.")
    j = torch.arange(k, dtype=torch.float64, device=c.device)
    all_wrong = ((n[:, None] - c[:, None] - j) / (n[:, None] - j)).clamp(min=0).prod(1)
    return 1 - all_wrong


def pass_at_k_variance(num_samples: int, num_correct: Tensor, k: int) -> Tensor:
    r"""Variance of a problem's `pass_at_k` over repeated sampling, if a sample is right with probability ``c/n``.

    .. math:: \operatorname{Var}_{c^* \sim B(n, c/n)} \text{pass@}k(n, c^*)

    A bootstrap over the samples of a problem would give this variance; here it is a sum over the possible counts.

    From ``n`` samples of each problem and ``c`` right ones ``[N]`` to ``[N]`` float64.

    >>> pass_at_k_variance(4, torch.tensor([0, 1, 4]), k=1)  # p(1 - p)/n
    tensor([0.0000, 0.0469, 0.0000], dtype=torch.float64)
    """
    from scipy.stats import binom

    counts = torch.arange(num_samples + 1)
    values = pass_at_k(num_samples, counts, k)
    pass_at_k(num_samples, num_correct, k)  # Raises for counts out of range.
    chances = torch.from_numpy(binom.pmf(counts.numpy(), num_samples, counts.numpy()[:, None] / num_samples))
    means = chances @ values  # [c]: the mean of pass@k if c/n is the true probability
    spread = (chances * (values - means[:, None]) ** 2).sum(1)
    return spread[num_correct.cpu()].to(num_correct.device)


def maj_at_k(votes: Sequence[int], correct: Sequence[bool], k: int) -> float:
    r"""Probability that a majority vote over `k` of a problem's ``n`` samples is right, an unbiased estimate.

    It is the mean over all :math:`\binom{n}{k}` subsets of the samples. In each of them the answer with most votes
    wins; answers with equally many votes win with equal probability. Samples without an answer do not vote, and a vote
    without a voter is wrong. An answer counts as right by the share of its samples that are right, which is 0 or 1
    unless equal answers got different verdicts. The subsets are not enumerated: for an answer with :math:`x` votes the
    number of subsets in which all others have at most :math:`x`, and :math:`t` of them as many, is a coefficient of a
    product of polynomials. All numbers are whole, so the result is exact.

    Equal numbers in `votes` are equal answers, and a negative one is a sample without an answer. It is a
    ValueError if ``k < 1``, or the problem has fewer than `k` samples.

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
    `others` holds the number of samples of each other answer, `silent` samples have none.
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

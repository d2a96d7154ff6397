"""Advantages from a reward of each token beside the outcome of each rollout.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from torch import Tensor

from grail_lightning.functional.advantages import group_sums


def process_advantages(
    rewards: Tensor, outcomes: Tensor, mask: Tensor, group: Tensor, *, weight: float = 1.0, discount: float = 1.0
) -> Tensor:
    r"""The outcome and the return of the token rewards, each relative to the other rows of the group.

    .. math:: A_{it} = o_i - \frac{1}{n-1} \sum_{j \ne i} o_j
              + c \sum_{s \ge t} \gamma^{s-t} \Bigl(r_{is} - \frac{1}{n-1} \sum_{j \ne i} \bar r_j\Bigr)

    ``n`` is the number of rows of the group, and ``\bar r_j`` is the mean reward of the tokens of row ``j``. A row that
    is alone in its group has the baseline 0.

    Args:
        rewards: ``[B, T]``, the reward ``r`` of each token.
        outcomes: ``[B]``, the outcome ``o`` of each row.
        mask: ``[B, T]`` bool, the valid tokens.
        group: ``[B]`` long, the group of each row.
        weight: c, the factor of the returns.
        discount: γ.

    Returns:
        ``[B, T]`` float64, zero outside the mask.

    Source: PRIME, arXiv 2502.01456, equation 5.
    """
    rewards, outcomes = rewards.double().masked_fill(~mask, 0), outcomes.double()
    means = rewards.sum(1) / mask.sum(1).clamp(min=1)
    centred = rewards - _others(means, group)[:, None]
    returns = discounted_returns(centred.masked_fill(~mask, 0), discount)
    advantages: Tensor = (outcomes - _others(outcomes, group))[:, None] + weight * returns
    return advantages.masked_fill(~mask, 0)


def discounted_returns(rewards: Tensor, discount: float = 1.0) -> Tensor:
    r"""``[B, T]``: the return from each token on, :math:`\sum_{s \ge t} \gamma^{s-t} r_s`.

    Args:
        rewards: ``[B, T]``, zero on padding.
        discount: γ.
    """
    if discount == 1:
        return rewards.flip(1).cumsum(1).flip(1)
    returns = rewards.clone()
    for t in range(rewards.shape[1] - 2, -1, -1):
        returns[:, t] += discount * returns[:, t + 1]
    return returns


def ranked_pairs(scores: Tensor, correct: Tensor, group: Tensor) -> tuple[float, int]:
    """Pairs of a right and a wrong row of one group.

    Args:
        scores: ``[B]``.
        correct: ``[B]`` bool.
        group: ``[B]`` long.

    Returns:
        How many of them have the higher score on the right row, where a tie counts one half; and how many there are.
    """
    pairs = (group[:, None] == group) & correct[:, None] & ~correct
    gaps = (scores[:, None] - scores)[pairs]
    return float((gaps > 0).sum()) + 0.5 * float((gaps == 0).sum()), int(pairs.sum())


def _others(values: Tensor, group: Tensor) -> Tensor:
    """``[B]``: the mean over the other rows of the group; 0 where there is none."""
    total, size = group_sums(values, group)
    mean = (total - values) / (size - 1).clamp(min=1)
    return mean.masked_fill(size == 1, 0)

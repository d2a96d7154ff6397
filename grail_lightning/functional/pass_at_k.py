"""The unbiased pass@k estimator."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor, k: int) -> Tensor:
    r"""Probability that at least one of `k` samples is right, an unbiased estimate from ``n ≥ k`` samples.

    .. math:: 1 - \binom{n - c}{k} / \binom{n}{k}

    Computed as a product of ratios, which cannot overflow.

    Args:
        num_samples: ``[N]`` (or one number), the samples drawn for each problem, ``n``.
        num_correct: ``[N]``, the right ones among them, ``c``.
        k: The number of samples of which one must be right.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: If ``k < 1``, a problem has fewer than `k` samples, or ``c`` is not in ``[0, n]``.

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

    Args:
        num_samples: The samples drawn for each problem, ``n``.
        num_correct: ``[N]``, the right ones among them, ``c``.
        k: The number of samples of which one must be right.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: See `pass_at_k`.

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

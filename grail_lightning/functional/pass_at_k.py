"""The unbiased pass@k estimator."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor | int, num_correct: Tensor, k: int) -> Tensor:
    r"""Probability that at least one of `k` samples is right, estimated without bias from ``n ≥ k`` samples.

    .. math:: 1 - \binom{n - c}{k} / \binom{n}{k}

    Computed as a product of ratios, which cannot overflow.

    Args:
        num_samples: ``[N]`` (or one number): samples drawn for each problem, ``n``.
        num_correct: ``[N]``: right ones among them, ``c``.
        k: How many samples a user would look at.

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

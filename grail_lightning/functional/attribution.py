"""Measures of the concentration of credit, and of its ability to find flawed tokens.

Shapes: ``B`` rows, ``T`` response tokens. Each function returns one value a row; rows without a value are NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.functional.tokens import masked_sum


def ess_ratio(credit: Tensor, mask: Tensor) -> Tensor:
    r"""Effective sample size of the credit over the length: :math:`(\sum|a_t|)^2 / (L \sum a_t^2)`; 1 is uniform.

    Args:
        credit: ``[B, T]``, advantage times weight, ``A·w``.
        mask: ``[B, T]`` bool, the valid response tokens.

    Returns:
        ``[B]``; NaN for a row without credit.
    """
    size = credit.abs()
    squares = masked_sum(size.square(), mask, dim=1)
    ratio = masked_sum(size, mask, dim=1).square() / (mask.sum(1) * squares)
    return torch.where(squares > 0, ratio, torch.nan)


def top_mass(credit: Tensor, mask: Tensor, share: float = 0.1) -> Tensor:
    r"""Share of :math:`\sum|a_t|` that belongs to its largest ``ceil(share · L)`` tokens.

    Args:
        credit: ``[B, T]``, advantage times weight, ``A·w``.
        mask: ``[B, T]`` bool, the valid response tokens.
        share: The share of the row's length.

    Returns:
        ``[B]``; NaN for a row without credit.
    """
    size = credit.abs().masked_fill(~mask, 0)
    ordered = size.sort(1, descending=True).values
    kept = torch.arange(size.shape[1], device=size.device) < (share * mask.sum(1)).ceil()[:, None]
    total = size.sum(1)
    return torch.where(total > 0, masked_sum(ordered, kept, dim=1) / total, torch.nan)


def pairwise_auroc(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    r"""Probability that a positive token has a higher score than a negative one of its row; ties count one half.

    .. math:: \frac{1}{|P||N|} \sum_{i \in P, j \in N} [s_i > s_j] + \tfrac12 [s_i = s_j]

    Args:
        scores: ``[B, T]``, the scores to compare.
        positive: ``[B, T]`` bool, the positive tokens.
        negative: ``[B, T]`` bool, the negative tokens.

    Returns:
        ``[B]`` float64; NaN where a row lacks one of the two.
    """
    rows = torch.full((len(scores),), torch.nan, dtype=torch.float64, device=scores.device)
    for row in (positive.any(1) & negative.any(1)).nonzero().flatten().tolist():
        gap = scores[row][positive[row]][:, None] - scores[row][negative[row]]
        rows[row] = (gap > 0).double().mean() + (gap == 0).double().mean() / 2
    return rows

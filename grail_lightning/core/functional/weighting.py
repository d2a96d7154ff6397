"""Maps from token scores to token weights, and weights from runs of tokens that several rollouts share.

Shapes: ``B`` rows, ``T`` response tokens. All statistics are per row, over its valid tokens. No argument is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grail_lightning.core.functional.tokens import masked_mean, masked_sum, masked_zscore

_LOG_EPS = 1e-8
# No token has this number. Tokens become characters, so that Python's fast substring search can be used on them.
_BREAK = chr(0x10FFFF)


def grail_map(
    scores: Tensor, mask: Tensor, *, mean: float = 1.0, std: float = 0.5, w_min: float = 0.5, w_max: float = 5.0
) -> Tensor:
    r"""GRAIL's weights: the z-score of the log-saliency, scaled and clamped.

    .. math:: w_t = \mathrm{clamp}(\mu + \sigma\, z_t,\ w_{min}, w_{max}),\quad z = \mathrm{zscore}(\log(s + 10^{-8}))

    Mean and variance in the z-score are those of the row's valid tokens, the variance with their number as its divisor.
    Where all scores are equal, the z-score is 0.

    Args:
        scores: ``[B, T]`` saliency ``s ≥ 0``; 0 on valid tokens after the answer span.
        mask: ``[B, T]`` bool, the valid response tokens.
        mean: ``μ``, the weight of a token of average log-saliency.
        std: ``σ``, the factor of the z-score.
        w_min: Lower clamp.
        w_max: Upper clamp.

    Returns:
        ``[B, T]``, zero outside the mask.

    Raises:
        ValueError: If ``w_min > w_max`` or `std` is negative.

    Source: GRAIL, arXiv 2606.04889, published trainer.
    """
    if w_min > w_max or std < 0:
        raise ValueError(f"`w_min` ≤ `w_max` and `std` ≥ 0 are needed, but got {w_min}, {w_max} and {std}.")
    z = masked_zscore(torch.log(scores + _LOG_EPS), mask)
    return (mean + std * z).clamp(w_min, w_max).masked_fill(~mask, 0)


def answer_overwrite(weights: Tensor, answer: Any, mask: Tensor, *, content: float = 5.0, rest: float = 1.0) -> Tensor:
    """Set the weights of the answer's tokens: one weight for its content, one for marker, brace and what follows.

    A token that overlaps both a brace and the content has the marker's weight, as published.

    `answer` has the masks ``[B, T]`` `content`, `marker` and `after`, as `core.rollout.batch.AnswerMasks`; `content`
    and `rest` are the two weights. The result is zero outside the mask.

    Source: GRAIL, arXiv 2606.04889, published trainer ("the boundary wins").
    """
    written = weights.masked_fill(answer.content, content).masked_fill(answer.marker | answer.after, rest)
    return written.masked_fill(~mask, 0)


def mean_one(weights: Tensor, mask: Tensor) -> Tensor:
    """Scale each row's weights to mean 1 over its valid tokens; ``[B, T] -> [B, T]``. A row of zeros is unchanged."""
    mean = masked_mean(weights, mask, dim=1)[:, None]
    return torch.where(mean > 0, weights / mean.clamp(min=torch.finfo(weights.dtype).tiny), weights)


def bilevel_map(
    scores: Tensor,
    mask: Tensor,
    *,
    quantile: float = 0.4,
    boost: float = 2.0,
    floor: float = 0.1,
    interpolate: bool = True,
    eps: float = 1e-12,
) -> Tensor:
    r"""OAR's bi-level weights: low scores are damped, high scores are boosted, and the sum is kept.

    :math:`\hat I` is the min-max scaled :math:`\log(1 + I)`, and ``q`` is its quantile:

    .. math::
        \omega = \max(\hat I / q, \text{floor}) \text{ below } q,\quad
        1 + \beta (\hat I - q) / (1 - q) \text{ from } q;\qquad \omega \leftarrow \omega L / \sum \omega

    All computations are in float64: scores are as small as 1e-7, which float32's log1p rounds away.

    Args:
        scores: ``[B, T]``, ``I ≥ 0``.
        mask: ``[B, T]`` bool, the tokens that are weighted.
        quantile: ``τ``, the quantile that separates low from high scores.
        boost: ``β``, the largest increase of a weight before rescaling.
        floor: Least weight before rescaling.
        interpolate: Whether ``q`` interpolates between order statistics; False takes ``sorted[floor(τ·L)]``.
        eps: A small number that keeps the divisions finite.

    Returns:
        ``[B, T]`` in the dtype of `scores`, zero outside the mask. A row of constant scores has weight 1.

    Raises:
        ValueError: If `quantile` is not in ``[0, 1)`` or `boost` or `floor` is negative.

    Source: OAR, arXiv 2601.07408, published scorer; the GRAIL repository's version: ``interpolate=False``.
    """
    if not 0 <= quantile < 1 or boost < 0 or floor < 0:
        raise ValueError(
            f"`quantile` in [0, 1), `boost`, `floor` ≥ 0 are needed, but got {quantile}, {boost}, {floor}."
        )
    logs = torch.log1p(scores.double())
    low = logs.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
    high = logs.masked_fill(~mask, -torch.inf).amax(1, keepdim=True)
    scaled = (logs - low) / (high - low + eps)
    q = _row_quantile(scaled, mask, quantile, interpolate)[:, None]
    weights = torch.where(scaled < q, (scaled / (q + eps)).clamp(min=floor), 1 + boost * (scaled - q) / (1 - q + eps))
    weights = weights * mask.sum(1, keepdim=True) / (masked_sum(weights, mask, dim=1)[:, None] + eps)
    weights = torch.where(high > low, weights, 1.0)
    return weights.masked_fill(~mask, 0).to(scores.dtype)


def _row_quantile(values: Tensor, mask: Tensor, quantile: float, interpolate: bool) -> Tensor:
    """The quantile of each row's valid values, ``[B]``; 0 for an empty row."""
    ordered = values.masked_fill(~mask, torch.inf).sort(1).values
    count = mask.sum(1).double()
    position = quantile * (count - 1).clamp(min=0) if interpolate else (quantile * count).floor()
    below = position.floor().long().clamp(max=values.shape[1] - 1)[:, None]
    above = position.ceil().long().clamp(max=values.shape[1] - 1)[:, None]
    low, high = ordered.gather(1, below).squeeze(1), ordered.gather(1, above).squeeze(1)
    mixed = low + (high - low) * (position - position.floor())
    return torch.where(count > 0, mixed, 0.0)


def segment_weights(
    token_ids: Tensor, entropy: Tensor, mask: Tensor, correct: Tensor, *, share: float = 0.8, min_length: int = 5
) -> Tensor:
    r"""LESS's weights of the rollouts of one group.

    ``n`` is the number of rollouts of one kind, right or wrong, to which a rollout belongs. Tokens of high entropy have
    weight 1, those of low entropy ``1/n``. Each maximal run of low entropy is searched in the runs of all rollouts. A
    run that occurs in right *and* wrong rollouts has weight 0 wherever it occurs. A run that occurs in ``k`` right
    rollouts alone, or in ``k`` wrong ones alone, has weight ``max(w, k/n)``. Where segments overlap, 0 has precedence.

    ``[B, T]`` in the dtype of `entropy`, zero outside the mask. `share` is the share of a row's tokens that counts as
    low entropy: at most the entropy at rank ``min(round(share · n), n − 1)`` of its ``n`` tokens, less within a run.
    `min_length` is the least number of tokens of a run.

    Source: LESS, arXiv 2512.00908, published code, in which the order of the rollouts decides how segments are merged
    and which of their occurrences are found.
    """
    count = mask.sum(1)
    rank = torch.minimum((share * count.double()).round().long(), count - 1).clamp(min=0)
    threshold = entropy.masked_fill(~mask, torch.inf).sort(1).values.gather(1, rank[:, None])
    right = correct.tolist()
    alike = [right.count(kind) for kind in right]
    kind_weights = torch.tensor([1 / n for n in alike], dtype=torch.float64)
    weights = torch.where((entropy <= threshold).cpu(), kind_weights[:, None], 1.0).masked_fill(~mask.cpu(), 0)
    texts, segments = _texts_of_runs(token_ids, mask & (entropy < threshold), min_length)
    shared = torch.zeros_like(weights, dtype=torch.bool)
    for segment in segments:
        holders = [row for row, text in enumerate(texts) if segment in text]
        in_both = len({right[row] for row in holders}) == 2
        for row in holders:
            for place in _occurrences(segment, texts[row]):
                tokens = slice(place, place + len(segment))
                shared[row, tokens] |= in_both
                if not in_both:
                    weights[row, tokens].clamp_(min=len(holders) / alike[row])
    return weights.masked_fill(shared, 0).to(entropy)


def _texts_of_runs(token_ids: Tensor, low: Tensor, min_length: int) -> tuple[list[str], list[str]]:
    """Each row as a string with one character a token and breaks between runs; and the distinct runs of all rows."""
    texts, runs = [], set()
    for ids, row_low in zip(token_ids.tolist(), low.tolist(), strict=True):
        text = "".join(chr(token) if keep else _BREAK for token, keep in zip(ids, row_low, strict=True))
        runs |= {run for run in text.split(_BREAK) if len(run) >= min_length}
        texts.append(text)
    return texts, sorted(runs)


def _occurrences(segment: str, text: str) -> Iterator[int]:
    place = text.find(segment)
    while place >= 0:
        yield place
        place = text.find(segment, place + 1)

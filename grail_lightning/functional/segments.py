"""Runs of low-entropy tokens that occur in several rollouts of one group.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# No token has this number. Tokens become characters, so that Python's fast substring search can be used on them.
_BREAK = chr(0x10FFFF)


def _low_entropy_tokens(entropy: Tensor, mask: Tensor, share: float = 0.8) -> tuple[Tensor, Tensor]:
    """Tokens at or below their row's entropy threshold, and strictly below it; ``[B, T]`` bool each.

    Args:
        entropy: ``[B, T]``, the entropy at each token.
        mask: ``[B, T]`` bool, the valid tokens.
        share: The threshold is the entropy at rank ``min(round(share · n), n − 1)`` of the row's ``n`` valid tokens.
    """
    count = mask.sum(1)
    ordered = entropy.masked_fill(~mask, torch.inf).sort(1).values
    rank = torch.minimum((share * count.double()).round().long(), count - 1).clamp(min=0)
    threshold = ordered.gather(1, rank[:, None])
    return mask & (entropy <= threshold), mask & (entropy < threshold)


def segment_weights(
    token_ids: Tensor,
    entropy: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    share: float = 0.8,
    min_length: int = 5,
) -> Tensor:
    r"""LESS's weights of the rollouts of one group.

    ``n`` is the number of rollouts of one kind, right or wrong, to which a rollout belongs. Tokens of high entropy have
    weight 1, those of low entropy ``1/n``. Each maximal run of low entropy is searched in the runs of all rollouts. A
    run that occurs in right *and* wrong rollouts has weight 0 wherever it occurs. A run that occurs in ``k`` right
    rollouts alone, or in ``k`` wrong ones alone, has weight ``max(w, k/n)``. Where segments overlap, 0 has precedence.

    Args:
        token_ids: ``[B, T]`` long, rows of one group.
        entropy: ``[B, T]``, the entropy at each token.
        mask: ``[B, T]`` bool, the valid tokens.
        correct: ``[B]`` bool, the right rollouts.
        share: The share of a row's tokens that counts as low entropy.
        min_length: Least number of tokens of a run.

    Returns:
        ``[B, T]`` in the dtype of `entropy`, zero outside the mask.

    Source: LESS, arXiv 2512.00908, published code, in which the order of the rollouts decides how segments are merged
    and which of their occurrences are found.
    """
    low, strictly_low = _low_entropy_tokens(entropy, mask, share)
    right = correct.tolist()
    alike = [max(1, sum(other == one for other in right)) for one in right]
    own = torch.tensor([1 / n for n in alike], dtype=torch.float64)
    weights = torch.where(low.cpu(), own[:, None], 1.0).masked_fill(~mask.cpu(), 0)
    texts, segments = _texts_of_runs(token_ids, strictly_low, min_length)
    shared = []
    for segment in segments:
        holders = [row for row, text in enumerate(texts) if segment in text]
        if len({right[row] for row in holders}) == 2:
            shared.append((segment, holders))
            continue
        for row in holders:
            for place in _occurrences(segment, texts[row]):
                weights[row, place : place + len(segment)].clamp_(min=len(holders) / alike[row])
    for segment, holders in shared:
        for row in holders:
            for place in _occurrences(segment, texts[row]):
                weights[row, place : place + len(segment)] = 0
    return weights.to(entropy)


def _texts_of_runs(token_ids: Tensor, low: Tensor, min_length: int) -> tuple[list[str], list[str]]:
    """Each row as a string with one character a token and breaks between runs; and the distinct runs of all rows."""
    texts, runs = [], set()
    for ids, kept in zip(token_ids.tolist(), low.tolist(), strict=True):
        text = "".join(chr(token) if keep else _BREAK for token, keep in zip(ids, kept, strict=True))
        found = [run for run in text.split(_BREAK) if len(run) >= min_length]
        runs |= set(found)
        texts.append(text)
    return texts, sorted(runs)


def _occurrences(segment: str, text: str) -> Iterator[int]:
    place = text.find(segment)
    while place >= 0:
        yield place
        place = text.find(segment, place + 1)

"""Two rewards: a small one for short responses, and one for hard problems alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def brevity(responses: Sequence[str], references: Sequence[str], **columns: Any) -> list[float]:
    """Near 1 for a short response; a half at `scale` tokens."""
    scale = columns.get("scale", 1000)
    return [1 / (1 + length / scale) for length in columns["lengths"]]


def hard_ones(
    responses: Sequence[str], references: Sequence[str], *, correct: Sequence[bool], level: Sequence[int | None]
) -> list[float | None]:
    """1 for a right answer to a problem of level 3 or more; no opinion about problems without a level."""
    return [None if given is None else float(right and given >= 3) for right, given in zip(correct, level, strict=True)]

"""Splits of generated problems: each problem belongs to one for ever, so draws for different splits are disjoint."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Literal, TypeVar

ProblemSplit = Literal["train", "validation", "test"]

P = TypeVar("P")
_SPLITS: tuple[ProblemSplit, ...] = ("train", "validation", "test")


def distinct(
    draw: Callable[[], P], text: Callable[[P], str], number: int, split: ProblemSplit, options: str
) -> list[P]:
    """Different problems of a split, drawn one by one; `options` are what makes a space larger, for the message."""
    problems: dict[str, P] = {}
    in_vain = 0
    # A tenth of the draws is of the smaller splits, and the last new problem of a small space takes long to come.
    while len(problems) < number and in_vain < min(200 * (len(problems) + 100), 1_000_000):
        problem = draw()
        new = split_of(text(problem)) == split and text(problem) not in problems
        if new:
            problems[text(problem)] = problem
        in_vain = 0 if new else in_vain + 1
    if len(problems) < number:
        raise ValueError(
            f"The {split} split hardly has {number} different problems: only {len(problems)} were found. Ask for "
            f"fewer, or raise {options}."
        )
    return list(problems.values())


def split_rng(split: ProblemSplit, seed: int, kind: str = "") -> random.Random:
    """The random numbers by which problems of a split are chosen, other ones for each kind of problem."""
    if split not in _SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(_SPLITS)}, but got {split!r}.")
    return random.Random(f"{kind}{split}-{seed}")  # noqa: S311 - problems, not secrets


def split_of(expression: str) -> ProblemSplit:
    """The split of a problem, by a hash of its text that does not depend on machine or run."""
    bucket = int.from_bytes(hashlib.blake2b(expression.encode(), digest_size=8).digest(), "big") % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"

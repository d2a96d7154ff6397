"""What an interval allows to be said: above, below or not distinguishable from a neutral value, world by world."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from grail_lightning.app.benchmark.result import Result, figure, worlds_of
from grail_lightning.app.results.statistics import Estimate

CHANCE = 0.5
"""The AUROC of a ranking that knows nothing."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure in a world, with the interval from which a sentence follows."""

    world: str
    estimate: Estimate
    neutral: float

    @property
    def sign(self) -> int:
        """1 if the interval is above the neutral value, -1 if it is below, 0 if it contains it."""
        return (self.estimate.low > self.neutral) - (self.estimate.high < self.neutral)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim of a verdict in one sentence, and the figures from which it follows."""

    claim: str
    evidence: str = ""
    main: bool = False  # Whether it is one of the few that a reader has to know.

    def __str__(self) -> str:
        return " ".join(filter(None, (sentence(self.claim), sentence(self.evidence))))


def claims(
    result: Result, path: Sequence[str], neutral: float, number: int = 1, limits: tuple[float, float] | None = None
) -> list[Claim]:
    """The claims of a figure in each world that has it; `number` of them, at least, hold together (see `widened`)."""
    found = {world: figure(result, world, *path) for world in worlds_of(result)}
    return [
        Claim(world=world, estimate=widened(estimate, number, limits), neutral=neutral)
        for world, estimate in found.items()
        if estimate is not None
    ]


def widened(estimate: Estimate, number: int, limits: tuple[float, float] | None = None) -> Estimate:
    r"""The interval that, with those of `number` - 1 others, contains all their values with a probability of 95 %.

    Each side is multiplied by :math:`z_{1 - 0.025 / m} / z_{0.975}` (Bonferroni, for figures that are about normal).

    Args:
        estimate: A figure with its 95 % interval.
        number: How many figures there are, m.
        limits: The smallest and the largest value that the figure can have.
    """
    quantile = NormalDist().inv_cdf
    factor = quantile(1 - 0.025 / max(1, number)) / quantile(0.975)
    low = estimate.value - factor * (estimate.value - estimate.low)
    high = estimate.value + factor * (estimate.high - estimate.value)
    if limits is not None:
        low, high = max(low, limits[0]), min(high, limits[1])
    return Estimate(value=estimate.value, low=low, high=high)


def by_sign(found: Iterable[Claim]) -> dict[int, list[Claim]]:
    """The claims above, at and below the neutral value: lists for 1, 0 and -1."""
    groups: dict[int, list[Claim]] = {1: [], 0: [], -1: []}
    for claim in found:
        groups[claim.sign].append(claim)
    return groups


def overlap(one: Estimate, other: Estimate) -> bool:
    """Whether the intervals of two figures have a value in common."""
    return one.low <= other.high and other.low <= one.high


# --- words --------------------------------------------------------------------------------------------------------


def brackets(estimate: Estimate, digits: int = 2) -> str:
    """``0.97 (0.93 to 1.00)``."""
    return f"{number(estimate.value, digits)} ({number(estimate.low, digits)} to {number(estimate.high, digits)})"


def each(found: Sequence[Claim], digits: int = 2) -> str:
    """The figures of a claim: ``0.97 (0.93 to 1.00) in sums``, or the ranges of several worlds."""
    estimates = [claim.estimate for claim in found]
    if len(found) < 2:
        return "".join(f"{brackets(claim.estimate, digits)} in {in_words(claim.world)}" for claim in found)
    values = [number(e.value, digits) for e in sorted(estimates, key=lambda e: e.value)]
    span = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    low, high = (number(limit, digits) for limit in (min(e.low for e in estimates), max(e.high for e in estimates)))
    limits = f" (intervals from {low} to {high})" if low != high else ""
    return f"{span} in {worlds(found)}{limits}"


def worlds(found: Sequence[Claim], number_of: int | None = None) -> str:
    """``sums, words and code``; ``all 4 worlds`` if `number_of` are all that there are, and not one alone."""
    if len(found) == number_of and number_of > 1:
        return f"all {number_of} worlds"
    return listed([in_words(claim.world) for claim in found])


def number(value: float, digits: int = 2) -> str:
    """A number with so many digits after the point, without a sign before zero."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def in_words(name: str) -> str:
    """The name of a world or of an error as text."""
    return name.replace("_", " ")


def plural(error: str) -> str:
    """``slips`` for ``slip``."""
    return f"{in_words(error)}s"


def listed(parts: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    return f" {last} ".join([*([", ".join(parts[:-1])] if parts[:-1] else []), *parts[-1:]])


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}" + ("" if not text or text.endswith(".") else ".")

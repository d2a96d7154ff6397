"""What all figures of a report have: an interval, and the difference from a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from grail_lightning.evaluation.comparison import Difference, Estimate
from grail_lightning.evaluation.statistics import holm


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure of one method.

    Attributes:
        method: The method's name.
        seeds: The number of its runs.
        estimate: The figure.
        difference: The difference from the baseline; None for the baseline itself, and for what is not compared.
        corrected: The p-value, corrected by Holm's method; NaN without a difference.
        detectable: The smallest difference that could have been shown; NaN without a difference.
        pairs: The number of seeds over which the difference is paired; None if seeds are not paired.
    """

    method: str
    seeds: int
    estimate: Estimate
    difference: Difference | None = None
    corrected: float = math.nan
    detectable: float = math.nan
    pairs: int | None = None


C = TypeVar("C", bound=Compared)


def with_corrected(family: Sequence[C]) -> list[C]:
    """The figures with their p-values corrected for the number of comparisons, and what could have been shown.

    Args:
        family: The figures that are corrected together.
    """
    found = [(place, figure.difference) for place, figure in enumerate(family) if figure.difference is not None]
    corrected = holm([difference.p_value for _, difference in found])
    result = list(family)
    for (place, difference), p_value in zip(found, corrected, strict=True):
        # Seeds that differ all alike tell nothing of what could be shown.
        least = math.nan if math.isnan(difference.low) else difference.detectable(len(found))
        result[place] = replace(family[place], corrected=p_value, detectable=least)
    return result

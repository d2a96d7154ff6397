"""What counts as equal, and what comes of a comparison."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LAYERS", "Conventions", "Outcome"]

LAYERS = ("string", "number", "structure", "symbolic", "math-verify")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """What counts as equal where people differ, and the caps.

    Args:
        tolerance: relative error within which a decimal of four or more digits stands for a number that no decimal can
            write exactly (1/3, a root). Two numbers that decimals can write must be equal exactly.
        percent_as_number: `28%` for 28, and 28 for `28%`.
        percent_as_fraction: `28%` for 0.28.
        missing_unit: accept a number without its unit, or with one that the reference does not have; two known units
            must agree in any case.
        ignore_case: words in any case.
        bare_tuple: `1,2` for the reference `(1,2)`.
        max_characters: longer answers are `capped`.
        max_nesting: deeper brackets are `capped`.
        max_digits: a longer run of digits is `capped`.
    """

    tolerance: float = 1e-6
    percent_as_number: bool = True
    percent_as_fraction: bool = True
    missing_unit: bool = True
    ignore_case: bool = True
    bare_tuple: bool = True
    max_characters: int = 2000
    max_nesting: int = 30
    max_digits: int = 1000


class Outcome(NamedTuple):
    """What `judge` found: status (right | wrong | missing | capped | unparseable) and the layer that decided."""

    status: str
    layer: str

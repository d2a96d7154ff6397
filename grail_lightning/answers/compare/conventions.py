"""What counts as equal, and the shapes that the layers pass to one another."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from grail_lightning.answers.grammar.nodes import Node

__all__ = ["LAYERS", "Conventions", "Engine", "Outcome"]

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


class Engine(Protocol):
    """The layers that may be slow."""

    def equal(self, left: Node, right: Node, tolerance: float) -> bool:
        """Whether two formulas are equal; `tolerance` is relative and for formulas without letters."""

    def ratio_sign(self, left: Node, right: Node) -> int:
        """The sign of left/right if that is a constant, 0 if it is not."""

    def external(self, gold: str, prediction: str, tolerance: float) -> bool | None:
        """The verdict of an outside library on two formulas; None if it cannot read them."""

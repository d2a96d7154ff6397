"""What surrounds two formulas: units, percent, degrees, powers of ten in words, and how precisely they are written."""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import reduce

from grail_lightning.answers.compare.conventions import Conventions
from grail_lightning.answers.grammar.nodes import Node, number
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["clash", "cut_off", "factors_between", "slack_between", "times"]

_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)
_HUNDREDTH = number(Fraction(1, 100))
_DEGREE = Node("function", "degrees", (number(1),))


def clash(gold: str, prediction: str) -> bool:
    """Whether two units are both known and different, so that equal numbers are not equal answers."""
    vague = any(not unit or "?" in unit or "unit" in unit for unit in (gold, prediction))
    return gold != prediction and not vague


def times(node: Node, *factors: Node) -> Node:
    """The product."""
    return reduce(lambda product, factor: Node("multiply", "", (product, factor)), factors, node)


def cut_off(text: str) -> bool:
    """Whether a text is a decimal whose digits go on, which no finite decimal is."""
    return text.endswith(r"\ldots")


def factors_between(
    left: Quantity, right: Quantity, conventions: Conventions
) -> Iterator[tuple[list[Node], list[Node]]]:
    """What two formulas may be multiplied with before they are compared: powers of ten, percent and degrees."""
    ours, theirs = ([number(10**side.zeros)] if side.zeros else [] for side in (left, right))
    if left.percent != right.percent:
        if conventions.percent_as_number:
            yield ours, theirs
        if conventions.percent_as_fraction:
            yield ([*ours, _HUNDREDTH], theirs) if left.percent else (ours, [*theirs, _HUNDREDTH])
    elif left.degrees and _in_radians(right):
        yield [*ours, _DEGREE], theirs
    elif right.degrees and _in_radians(left):
        yield ours, [*theirs, _DEGREE]
    else:
        yield ours, theirs


def _in_radians(quantity: Quantity) -> bool:
    return not quantity.degrees and (quantity.unit == "rad" or r"\pi" in quantity.text)


def slack_between(left: Quantity, right: Quantity, tolerance: float) -> float:
    """The relative tolerance: none unless exactly one of the two is a decimal of four or more digits."""
    decimals = [_significant_digits(quantity.text) for quantity in (left, right)]
    return tolerance if max(decimals) >= 4 and min(decimals) == 0 else 0.0


def _significant_digits(text: str) -> int:
    """Digits of a decimal literal from the first that is not zero; 0 for anything else."""
    found = _DECIMAL.fullmatch(text.replace(" ", ""))
    return len(found[1].replace(".", "").lstrip("0")) if found else 0

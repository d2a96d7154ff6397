"""What surrounds two formulas: units, percent, degrees, powers of ten in words, and how precisely they are written."""

import re
from fractions import Fraction

from grail_lightning.answers.compare.conventions import Conventions
from grail_lightning.answers.grammar.nodes import Node, number
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["clash", "cut_off", "factors_between", "scaled_by_zeros", "significant_digits", "slack_between", "times"]

_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)


def clash(gold: str, prediction: str) -> bool:
    """Whether two units are both known and different, so that equal numbers are not equal answers."""
    if not gold or not prediction or "?" in gold or "?" in prediction or "unit" in gold or "unit" in prediction:
        return False
    return gold != prediction


def scaled_by_zeros(node: Node, zeros: int) -> Node:
    """The formula times ten to the power of `zeros`."""
    return Node("multiply", "", (node, number(10**zeros))) if zeros else node


def times(node: Node, factor: Node | None) -> Node:
    """The product; None is one."""
    return node if factor is None else Node("multiply", "", (node, factor))


def significant_digits(text: str) -> int:
    """Digits of a decimal literal from the first that is not zero; 0 for anything else."""
    found = _DECIMAL.fullmatch(text.replace(" ", ""))
    return len(found[1].replace(".", "").lstrip("0")) if found else 0


def cut_off(text: str) -> bool:
    """Whether a text is a decimal whose digits go on, which no finite decimal is."""
    return text.endswith(r"\ldots")


def factors_between(left: Quantity, right: Quantity, conventions: Conventions) -> list[tuple[Node | None, Node | None]]:
    """What two formulas may be multiplied with before they are compared: percent and degrees."""
    hundredth, radian = number(Fraction(1, 100)), Node("function", "degrees", (number(1),))
    if left.percent != right.percent:
        plain, part = conventions.percent_as_number, conventions.percent_as_fraction
        scales = ([None] if plain else []) + ([hundredth] if part else [])
        return [(scale, None) if left.percent else (None, scale) for scale in scales]
    if left.degrees != right.degrees:
        bare = right if left.degrees else left
        if r"\pi" in bare.text:
            return [(radian, None) if left.degrees else (None, radian)]
    return [(None, None)]


def slack_between(left: Quantity, right: Quantity, tolerance: float) -> float:
    """The relative tolerance: none unless exactly one of the two is a decimal of four or more digits."""
    decimals = [significant_digits(quantity.text) for quantity in (left, right)]
    lone = max(decimals) >= 4 and min(decimals) == 0
    return tolerance if lone else 0.0

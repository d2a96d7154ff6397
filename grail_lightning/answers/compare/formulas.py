"""Are two formulas equal, with their units, percent and degrees? Exact numbers first, then the slow layers."""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import reduce

from grail_lightning.answers.compare import symbolic
from grail_lightning.answers.compare.conventions import LAYERS, Conventions
from grail_lightning.answers.compare.exact import is_terminating, rational
from grail_lightning.answers.grammar.kinds import Leaf
from grail_lightning.answers.grammar.nodes import Node, mentions, number
from grail_lightning.answers.grammar.normalise import string_key
from grail_lightning.answers.grammar.prose import anagrams, wordy
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Formulas", "Undecided", "Unparseable", "same_form"]

_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)
_HUNDREDTH = number(Fraction(1, 100))
_DEGREE = Node("function", "degrees", (number(1),))


class Undecided(Exception):  # noqa: N818
    """Only a slow layer can tell."""


class Unparseable(Exception):  # noqa: N818
    """The prediction has no meaning that any layer finds."""


class Formulas:
    """Compares the formulas of one pair of answers; `layer` is the deepest that was needed so far."""

    def __init__(self, conventions: Conventions, *, slow: bool) -> None:
        self.conventions = conventions
        self.slow = slow
        self.layer = 0

    def reach(self, layer: str) -> None:
        """Note that a layer is needed, which must be allowed if it is slow."""
        if layer in ("symbolic", "math-verify") and not self.slow:
            raise Undecided
        self.layer = max(self.layer, LAYERS.index(layer))

    def leaves(self, gold: Leaf, other: Leaf) -> bool:
        """Two formulas with what surrounds them."""
        left, right = gold.quantity, other.quantity
        if _clash(left.unit, right.unit) or (not self.conventions.missing_unit and left.unit != right.unit):
            return False
        if string_key(left.text) == string_key(right.text) and left[2:] == right[2:]:
            return True
        if anagrams(left.text, right.text):
            return False
        if gold.node is None or other.node is None:
            return self.unknown(left, right, other.node is None)
        slack = _slack_between(left, right, self.conventions.tolerance)
        if right.text.endswith(r"\ldots") and not left.text.endswith(r"\ldots"):  # no finite decimal goes on
            value = rational(gold.node)
            if not slack or (value is not None and is_terminating(value)):
                return False
        factors = _factors_between(left, right, self.conventions)
        return any(self.nodes(_times(gold.node, *ours), _times(other.node, *theirs), slack) for ours, theirs in factors)

    def nodes(self, gold: Node, other: Node, slack: float = 0.0) -> bool:
        """Two formulas."""
        left, right = rational(gold), rational(other)
        if gold == other:  # two spellings of one formula
            self.reach("structure" if left is None else "number")
            return True
        if left is not None and right is not None:
            self.reach("number")
            if left == right or slack == 0 or (is_terminating(left) and is_terminating(right)):
                return left == right
            return abs(left - right) <= Fraction(str(slack)) * abs(left)
        if mentions(gold, "inf") or mentions(other, "inf"):
            return _sign_of_infinity(gold) == _sign_of_infinity(other) != 0
        if gold.kind == other.kind == "symbol":
            return False
        if (left is not None and _single(other)) or (right is not None and _single(gold)):
            return False
        self.reach("symbolic")
        return symbolic.equal(gold, other, slack)

    def unknown(self, left: Quantity, right: Quantity, prediction_unknown: bool) -> bool:
        """A formula outside of the grammar."""
        if wordy(left.text) or wordy(right.text):
            if prediction_unknown:
                raise Unparseable
            return False
        self.reach("math-verify")
        from grail_lightning.answers.compare import external  # it takes a while; a worker has it

        verdict = external.equal(left.text, right.text, self.conventions.tolerance)
        if verdict is None:
            raise Unparseable
        return verdict


def _single(node: Node) -> bool:
    """Whether a formula is one letter, possibly with a rational factor: never equal to a number."""
    return node.kind == "symbol" or (
        node.kind in ("negate", "multiply")
        and all(_single(argument) or argument.kind == "number" for argument in node.args)
        and sum(_single(argument) for argument in node.args) == 1
        and all(argument.value != 0 for argument in node.args if argument.kind == "number")
    )


def _sign_of_infinity(node: Node) -> int:
    """1 or -1 for a signed infinity, 0 for anything else."""
    if node == Node("constant", "inf"):
        return 1
    return -_sign_of_infinity(node.args[0]) if node.kind == "negate" else 0


def same_form(one: Node, two: Node) -> bool:
    """Whether two formulas without letters are the same tree, or two spellings of one number such as 1/2 and 0.5."""
    return one == two or (_spelled(one) and _spelled(two) and rational(one) == rational(two))


def _spelled(node: Node) -> bool:
    return node.kind == "number" or (node.kind in ("negate", "divide") and all(map(_spelled, node.args)))


def _clash(gold: str, prediction: str) -> bool:
    """Whether two units are both known and different, so that equal numbers are not equal answers."""
    return gold != prediction and all(unit and "?" not in unit and "unit" not in unit for unit in (gold, prediction))


def _times(node: Node, *factors: Node) -> Node:
    """The product."""
    return reduce(lambda product, factor: Node("multiply", "", (product, factor)), factors, node)


def _factors_between(
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


def _slack_between(left: Quantity, right: Quantity, tolerance: float) -> float:
    """The relative tolerance: none unless exactly one of the two is a decimal of four or more digits."""
    decimals = [_significant_digits(quantity.text) for quantity in (left, right)]
    return tolerance if max(decimals) >= 4 and min(decimals) == 0 else 0.0


def _significant_digits(text: str) -> int:
    """Digits of a decimal literal from the first that is not zero; 0 for anything else."""
    found = _DECIMAL.fullmatch(text.replace(" ", ""))
    return len(found[1].replace(".", "").lstrip("0")) if found else 0

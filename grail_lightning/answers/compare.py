"""Are two formulas, or two sets of real numbers, equal? What counts as equal is in `Conventions`."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate, groupby
from operator import and_, gt, or_
from typing import NamedTuple

from grail_lightning.answers.normalise import string_key
from grail_lightning.answers.parse import Node, negated, number
from grail_lightning.answers.structure import Answer, Group, Leaf, Many, Quantity, Relation, Union
from grail_lightning.answers.values import agree_everywhere, approximate, is_terminating, rational
from grail_lightning.answers.wording import anagrams, wordy

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


_DIGITS = re.compile(r"\d+")
_LARGE_EXPONENT = re.compile(r"[eE][+-]?0*(\d{4,})")


def capped(text: str, conventions: Conventions) -> bool:
    """Whether a text is too large in one way or another for anything that parses."""
    if len(text) > conventions.max_characters or "\0" in text or _LARGE_EXPONENT.search(text):
        return True
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths, default=0) > conventions.max_nesting or any(
        len(run) > conventions.max_digits for run in _DIGITS.findall(text)
    )


class Outcome(NamedTuple):
    """What `judge` found: status (right | wrong | missing | capped | unparseable) and the layer that decided."""

    status: str
    layer: str


_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)
_ONE = number(1)
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
        return any(self.nodes(_times(gold.node, ours), _times(other.node, theirs), slack) for ours, theirs in factors)

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
        if gold.kind == other.kind == "symbol":
            return False
        self.reach("symbolic")
        return agree_everywhere(gold, other, slack)

    def unknown(self, left: Quantity, right: Quantity, prediction_unknown: bool) -> bool:
        """A formula outside of the grammar."""
        if wordy(left.text) or wordy(right.text):
            if prediction_unknown:
                raise Unparseable
            return False
        self.reach("math-verify")
        from grail_lightning.answers import external  # it takes a while; a worker has it

        verdict = external.equal(left.text, right.text, self.conventions.tolerance)
        if verdict is None:
            raise Unparseable
        return verdict


def same_form(one: Node, two: Node) -> bool:
    """Whether two formulas without letters are the same tree, or two spellings of one number such as 1/2 and 0.5."""
    return one == two or (_spelled(one) and _spelled(two) and rational(one) == rational(two))


def _spelled(node: Node) -> bool:
    return node.kind == "number" or (node.kind in ("negate", "divide") and all(map(_spelled, node.args)))


def _clash(gold: str, prediction: str) -> bool:
    """Whether two units are both known and different, so that equal numbers are not equal answers."""
    return gold != prediction and all(unit and "?" not in unit and "unit" not in unit for unit in (gold, prediction))


def _times(node: Node, factor: Node) -> Node:
    return node if factor is _ONE else Node("multiply", "", (node, factor))


def _factors_between(left: Quantity, right: Quantity, conventions: Conventions) -> Iterator[tuple[Node, Node]]:
    """What two formulas may be multiplied with before they are compared: percent and degrees."""
    if left.percent != right.percent:
        if conventions.percent_as_number:
            yield _ONE, _ONE
        if conventions.percent_as_fraction:
            yield (_HUNDREDTH, _ONE) if left.percent else (_ONE, _HUNDREDTH)
    elif left.degrees and _in_radians(right):
        yield _DEGREE, _ONE
    elif right.degrees and _in_radians(left):
        yield _ONE, _DEGREE
    else:
        yield _ONE, _ONE


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


_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_INFINITY = Node("constant", "inf")


class Cut(NamedTuple):
    """An end of a set: about where it is, whether right after that number or right before it, and the exact formula."""

    place: float
    after: bool
    node: Node


Cuts = tuple[Cut, ...]  # in order; the set lies between the first and the second, the third and the fourth, and so on
_LEAST = Cut(-math.inf, True, negated(_INFINITY))
_GREATEST = Cut(math.inf, False, _INFINITY)
_ALL: Cuts = (_LEAST, _GREATEST)


def as_cuts(answer: Answer) -> Cuts | None:
    r"""The set of real numbers that an answer describes, as the ends of its intervals; None if it describes none."""
    match answer:
        case Leaf(quantity=Quantity(text=r"\mathbb{R}")):
            return _ALL
        case Group(brackets="()" | "[]" | "(]" | "[)" as brackets, items=(low, high)):
            return _interval(low, high, brackets)
        case Union(parts=parts, signs=signs):
            cuts = as_cuts(parts[0])
            for sign, part in zip(signs, parts[1:], strict=True):
                cuts = _combined({r"\cup": or_, r"\cap": and_, r"\setminus": gt}[sign], cuts, as_cuts(part))
            return cuts
        case Relation(sides=(Leaf(node=Node(kind="symbol")), values), signs=(r"\in",)):
            return as_cuts(values)
        case Relation():
            return _solutions(answer)
        case Many(braced=True, items=items):
            nothing: Cuts | None = ()
            return reduce(partial(_combined, or_), (_interval(item, item, "[]") for item in items), nothing)
        case Many(items=items, joint=joint) if all(isinstance(item, Relation) for item in items):
            return reduce(partial(_combined, or_ if joint == "or" else and_), map(as_cuts, items))
    return None


def _combined(operator: Callable[[bool, bool], bool], left: Cuts | None, right: Cuts | None) -> Cuts | None:
    """The numbers for which `operator` holds of being in the one set and in the other; None if one set is None."""
    if left is None or right is None:
        return None
    result: list[Cut] = []
    inside = [False, False]
    ends = sorted([(cut, 0) for cut in left] + [(cut, 1) for cut in right], key=lambda end: end[0][:2])
    for _, same in groupby(ends, key=lambda end: end[0][:2]):
        for cut, side in same:  # noqa: B007 (the last of those at one place)
            inside[side] = not inside[side]
        if operator(*inside) != bool(len(result) % 2):
            result.append(cut)
    return tuple(result)


def _cut(item: Answer, after: bool) -> Cut | None:
    if not isinstance(item, Leaf) or item.node is None or item.quantity.percent or item.quantity.degrees:
        return None
    place = approximate(item.node)
    return None if place is None else Cut(place, after, item.node)


def _interval(first: Answer, last: Answer, brackets: str) -> Cuts | None:
    r"""None if there is none: `[-\infty, 0)` is not the half line, and `(3,1)` is a pair."""
    low, high = _cut(first, brackets[0] == "("), _cut(last, brackets[1] == "]")
    if low is None or high is None or not _LEAST[:2] <= low[:2] < high[:2] <= _GREATEST[:2]:
        return None
    return low, high


def _solutions(relation: Relation) -> Cuts | None:
    result: Cuts | None = _ALL
    names = set()
    for left, sign, right in zip(relation.sides, relation.signs, relation.sides[1:], strict=False):
        solved = _solve(left, sign, right) or _solve(right, _FLIPPED.get(sign, ""), left)
        if solved is None:
            return None
        names.add(solved[0])
        result = _combined(and_, result, solved[1])
    return result if len(names) == 1 else None


def _solve(left: Answer, sign: str, right: Answer) -> tuple[str, Cuts | None] | None:
    """The name and the solutions of `name sign constant` and `|name| sign constant`."""
    end = _cut(right, after=False)
    if sign not in _FLIPPED or not isinstance(left, Leaf) or left.node is None or end is None:
        return None
    if left.node.kind == "symbol":
        return str(left.node.value), _half_line(sign, end.place, end.node)
    if left.node.value == "abs" and left.node.args[0].kind == "symbol":
        solutions = _half_line(sign, end.place, end.node), _half_line(_FLIPPED[sign], -end.place, negated(end.node))
        operator = or_ if sign in (">", r"\ge") else and_
        return str(left.node.args[0].value), _combined(operator, *solutions)
    return None


def _half_line(sign: str, place: float, node: Node) -> Cuts:
    before, after = Cut(place, False, node), Cut(place, True, node)
    return {
        "<": (_LEAST, before),
        r"\le": (_LEAST, after),
        ">": (after, _GREATEST),
        r"\ge": (before, _GREATEST),
        r"\ne": (_LEAST, before, after, _GREATEST),
    }[sign]

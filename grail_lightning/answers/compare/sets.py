"""Sets of real numbers as the places where they begin and end: from brackets, inequalities and set operations."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import groupby
from operator import and_, gt, or_
from typing import NamedTuple

from grail_lightning.answers.compare.exact import TooLarge, Undefined, rational
from grail_lightning.answers.compare.numeric import approximate
from grail_lightning.answers.grammar.kinds import Answer, Group, Leaf, Many, Relation, Union, Words
from grail_lightning.answers.grammar.nodes import Node, letters, negated, number
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Cut", "Cuts", "as_cuts"]

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_INFINITY = Node("constant", "inf")
_REALS = (r"\mathbb{R}", "all real numbers")


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
    r"""The set of real numbers that an answer describes, as the ends of its intervals; None if it describes none.

    Args:
        answer: such as `[0,1)`, `(-\infty,2)\cup(3,\infty)`, `x<2`, `-1<x\le 3` or `\mathbb{R}\setminus\{3\}`.
    """
    match answer:
        case Words(text=text) | Leaf(quantity=Quantity(text=text)):
            return _ALL if text in _REALS else None
        case Group(brackets="()" | "[]" | "(]" | "[)" as brackets, items=(low, high)):
            return _interval(low, high, brackets)
        case Union(parts=parts, signs=signs):
            result = as_cuts(parts[0])
            for sign, part in zip(signs, parts[1:], strict=True):
                result = _combined({r"\cup": or_, r"\cap": and_, r"\setminus": gt}[sign], result, as_cuts(part))
            return result
        case Relation(sides=(Leaf(node=Node(kind="symbol")), values), signs=(r"\in",)):
            return as_cuts(values)
        case Relation():
            return _solutions(answer)
        case Many(braced=True, items=items):
            return _joined(or_, (), *(_interval(item, item, "[]") for item in items))
        case Many(items=items, joint=joint) if all(isinstance(item, Relation) for item in items):
            return _joined(or_ if joint == "or" else and_, *map(as_cuts, items))
    return None


def _joined(operator: Callable[[bool, bool], bool], first: Cuts | None, *others: Cuts | None) -> Cuts | None:
    for other in others:
        first = _combined(operator, first, other)
    return first


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
    """The name and the solutions of `|name| sign constant` or of a linear relation, such as `name sign constant`."""
    end = _cut(right, after=False)
    if sign not in _FLIPPED or not isinstance(left, Leaf) or left.node is None or end is None:
        return None
    if left.node.kind == "function" and left.node.value == "abs" and left.node.args[0].kind == "symbol":
        solutions = _half_line(sign, end.place, end.node), _half_line(_FLIPPED[sign], -end.place, negated(end.node))
        outside = sign in (">", r"\ge")
        return str(left.node.args[0].value), _combined(or_ if outside else and_, *solutions)
    return _solve_linear(left.node, sign, end.node)


def _solve_linear(node: Node, sign: str, border: Node) -> tuple[str, Cuts] | None:
    names = letters(node)
    if len(names) != 1:
        return None
    name = names.pop()
    try:
        values = [rational(_substituted(node, name, Fraction(value))) for value in (0, 1, 2, 5)]
    except (TooLarge, Undefined):
        return None
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    start, *rest = known
    slope = rest[0] - start
    if not slope or rest != [start + slope, start + 2 * slope, start + 5 * slope]:
        return None
    if start or slope != 1:
        target = rational(border)
        if target is None:
            return None
        border = number((target - start) / slope)
    place = approximate(border)
    return None if place is None else (name, _half_line(sign if slope > 0 else _FLIPPED[sign], place, border))


def _substituted(node: Node, name: str, value: Fraction) -> Node:
    if node.kind == "symbol" and node.value == name:
        return number(value)
    return Node(node.kind, node.value, tuple(_substituted(argument, name, value) for argument in node.args))


def _half_line(sign: str, place: float, node: Node) -> Cuts:
    before, after = Cut(place, False, node), Cut(place, True, node)
    return {
        "<": (_LEAST, before),
        r"\le": (_LEAST, after),
        ">": (after, _GREATEST),
        r"\ge": (before, _GREATEST),
        r"\ne": (_LEAST, before, after, _GREATEST),
    }[sign]

"""Sets of real numbers as unions of intervals: from brackets, inequalities and set operations to one normal form."""

from dataclasses import dataclass
from fractions import Fraction

from grail_lightning.answers.compare.approximate import approximate
from grail_lightning.answers.compare.evaluate import TooLarge, Undefined
from grail_lightning.answers.compare.exact import rational
from grail_lightning.answers.grammar.kinds import Answer, Group, Leaf, Many, Relation, Union, Words
from grail_lightning.answers.grammar.nodes import Node, letters

__all__ = ["Edge", "Interval", "as_intervals"]

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne", "=": "="}
_INFINITY = Node("constant", "inf")
_REALS = frozenset([r"\mathbb{R}", "all real numbers"])


@dataclass(frozen=True, slots=True)
class Edge:
    """An end of an interval: about where it is, the exact formula, and whether it belongs to the interval."""

    place: float
    node: Node
    closed: bool


@dataclass(frozen=True, slots=True)
class Interval:
    """All numbers between two edges."""

    low: Edge
    high: Edge

    @property
    def empty(self) -> bool:
        """Whether no number lies in it."""
        both = self.low.closed and self.high.closed
        return self.low.place > self.high.place or (self.low.place == self.high.place and not both)


_LEAST = Edge(float("-inf"), Node("negate", "", (_INFINITY,)), closed=False)
_GREATEST = Edge(float("inf"), _INFINITY, closed=False)
Intervals = tuple[Interval, ...]
_ALL: Intervals = (Interval(_LEAST, _GREATEST),)


def as_intervals(answer: Answer) -> Intervals | None:
    r"""The set of real numbers that an answer describes, as sorted disjoint intervals; None if it describes none.

    Args:
        answer: such as `[0,1)`, `(-\infty,2)\cup(3,\infty)`, `x<2`, `-1<x\le 3` or `\mathbb{R}\setminus\{3\}`.
    """
    if isinstance(answer, Words):
        return _ALL if answer.text in _REALS else None
    if isinstance(answer, Leaf):
        return _ALL if answer.quantity.text in _REALS else None
    if isinstance(answer, Group):
        return _from_group(answer)
    if isinstance(answer, Union):
        return _from_union(answer)
    if isinstance(answer, Relation):
        return _from_relation(answer)
    if isinstance(answer, Many) and answer.braced:
        return _from_points(answer)
    if isinstance(answer, Many) and all(isinstance(item, Relation) for item in answer.items):
        return _joined(answer)
    return None


def _joined(answer: Many) -> Intervals | None:
    parts = [as_intervals(item) for item in answer.items]
    result: Intervals | None = None
    for part in parts:
        if part is None:
            return None
        if result is None:
            result = part
        else:
            result = _union(result, part) if answer.joint == "or" else _intersection(result, part)
    return result


def _edge(item: Answer, closed: bool) -> Edge | None:
    if not isinstance(item, Leaf) or item.node is None or item.quantity.percent or item.quantity.degrees:
        return None
    place = approximate(item.node)
    return None if place is None else Edge(place, item.node, closed)


def _from_group(answer: Group) -> Intervals | None:
    if len(answer.items) != 2:
        return None
    low = _edge(answer.items[0], answer.brackets[0] == "[")
    high = _edge(answer.items[1], answer.brackets[-1] == "]")
    if low is None or high is None or low.place > high.place:
        return None
    if any(abs(edge.place) == float("inf") and edge.closed for edge in (low, high)):
        return None  # `[-\\infty, 0)` is not the half line
    return (Interval(low, high),)


def _from_points(answer: Many) -> Intervals | None:
    edges = [_edge(item, closed=True) for item in answer.items]
    known = [edge for edge in edges if edge is not None]
    return _sorted([Interval(edge, edge) for edge in known]) if len(known) == len(edges) else None


def _from_union(answer: Union) -> Intervals | None:
    parts = [as_intervals(part) for part in answer.parts]
    result = parts[0]
    for sign, part in zip(answer.signs, parts[1:], strict=True):
        if result is None or part is None:
            return None
        if sign == r"\cup":
            result = _union(result, part)
        else:
            result = _intersection(result, part if sign == r"\cap" else _complement(part))
    return result


def _from_relation(answer: Relation) -> Intervals | None:
    if answer.signs == (r"\in",):
        return as_intervals(answer.sides[1]) if _symbol(answer.sides[0]) else None
    result, names = _ALL, set()
    for left, sign, right in zip(answer.sides, answer.signs, answer.sides[1:], strict=False):
        solved = _solve(left, sign, right) or _solve(right, _FLIPPED.get(sign, ""), left)
        if solved is None:
            return None
        names.add(solved[0])
        result = _intersection(result, solved[1])
    return result if len(names) == 1 and all(sign != "=" for sign in answer.signs) else None


def _symbol(answer: Answer) -> str | None:
    node = answer.node if isinstance(answer, Leaf) else None
    return str(node.value) if node is not None and node.kind == "symbol" else None


def _solve(left: Answer, sign: str, right: Answer) -> tuple[str, Intervals] | None:
    """The name and the solutions of `name sign constant`, `|name| sign constant` or a linear relation."""
    if sign not in _FLIPPED or not isinstance(left, Leaf) or left.node is None:
        return None
    edge = _edge(right, closed=sign in (r"\le", r"\ge"))
    if edge is None:
        return None
    if left.node.kind == "symbol":
        return str(left.node.value), _half_line(sign, edge)
    if left.node.kind == "function" and left.node.value == "abs" and left.node.args[0].kind == "symbol":
        mirrored = Edge(-edge.place, Node("negate", "", (edge.node,)), edge.closed)
        outside = _union(_half_line(sign, edge), _half_line(_FLIPPED[sign], mirrored))
        inside = _intersection(_half_line(sign, edge), _half_line(_FLIPPED[sign], mirrored))
        return str(left.node.args[0].value), inside if sign in ("<", r"\le") else outside
    return _solve_linear(left.node, sign, edge)


def _solve_linear(node: Node, sign: str, edge: Edge) -> tuple[str, Intervals] | None:
    names = letters(node)
    if len(names) != 1:
        return None
    name = names.pop()
    try:
        at = [rational(_substituted(node, name, Fraction(value))) for value in (0, 1, 2, 5)]
        target = rational(edge.node)
    except (TooLarge, Undefined):
        return None
    if target is None or at[0] is None or at[1] is None or at[2] is None or at[3] is None:
        return None
    slope = at[1] - at[0]
    if not slope or at[2] != at[0] + 2 * slope or at[3] != at[0] + 5 * slope:
        return None
    border = (target - at[0]) / slope
    moved = Edge(float(border), Node("number", border), edge.closed)
    return name, _half_line(sign if slope > 0 else _FLIPPED[sign], moved)


def _substituted(node: Node, name: str, value: Fraction) -> Node:
    if node.kind == "symbol" and node.value == name:
        return Node("number", value)
    return Node(node.kind, node.value, tuple(_substituted(argument, name, value) for argument in node.args))


def _half_line(sign: str, edge: Edge) -> Intervals:
    if sign in ("<", r"\le"):
        return _kept([Interval(_LEAST, edge)])
    if sign in (">", r"\ge"):
        return _kept([Interval(edge, _GREATEST)])
    point = Edge(edge.place, edge.node, closed=True)
    return (Interval(point, point),) if sign == "=" else _complement((Interval(point, point),))


def _kept(intervals: list[Interval]) -> Intervals:
    return tuple(interval for interval in intervals if not interval.empty)


def _sorted(intervals: list[Interval]) -> Intervals:
    """Disjoint intervals in order; those that touch are one."""
    merged: list[Interval] = []
    for interval in sorted(_kept(intervals), key=lambda item: (item.low.place, not item.low.closed)):
        last = merged[-1] if merged else None
        if last is not None and (
            interval.low.place < last.high.place
            or (interval.low.place == last.high.place and (interval.low.closed or last.high.closed))
        ):
            high = max(last.high, interval.high, key=lambda edge: (edge.place, edge.closed))
            merged[-1] = Interval(last.low, high)
        else:
            merged.append(interval)
    return tuple(merged)


def _union(left: Intervals, right: Intervals) -> Intervals:
    return _sorted([*left, *right])


def _complement(intervals: Intervals) -> Intervals:
    gaps, low = [], _LEAST
    for interval in intervals:
        gaps.append(Interval(low, Edge(interval.low.place, interval.low.node, not interval.low.closed)))
        low = Edge(interval.high.place, interval.high.node, not interval.high.closed)
    gaps.append(Interval(low, _GREATEST))
    return _kept([Interval(_open(gap.low), _open(gap.high)) for gap in gaps])


def _open(edge: Edge) -> Edge:
    return Edge(edge.place, edge.node, edge.closed and abs(edge.place) != float("inf"))


def _intersection(left: Intervals, right: Intervals) -> Intervals:
    return _complement(_union(_complement(left), _complement(right)))

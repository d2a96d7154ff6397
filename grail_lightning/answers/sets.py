"""The set of real numbers that an answer describes: an interval, a union, an inequality, its solutions."""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import and_, or_, sub

from grail_lightning.answers.parse import Node, letters, negated
from grail_lightning.answers.structure import Answer, Chain, Group, Leaf, Many
from grail_lightning.answers.values import approximate

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_OPERATORS = {r"\cup": or_, r"\cap": and_, r"\setminus": sub}
_INFINITY = Node("constant", "inf")
Places = frozenset[int]


def same_set(one: Answer, two: Answer, equal: Callable[[Node, Node], bool]) -> bool:
    """Whether both answers describe sets of real numbers, and the same; `equal` compares the ends."""
    line = _Line([*_numbers(one), *_numbers(two)], equal)
    try:
        return line.places(one) == line.places(two)
    except KeyError:
        return False


def _numbers(answer: Answer) -> Iterator[Node]:
    """The formulas without letters in an answer: those that may be ends of its intervals."""
    match answer:
        case Leaf(node=Node() as node) if not letters(node):
            yield node
        case Group(items=items) | Many(items=items) | Chain(items=items):
            for item in items:
                yield from _numbers(item)


class _Line:
    """The real line, cut at some numbers: these have odd places in their order, the gaps between them even ones.

    A set is the places in it. What is no set of real numbers raises a KeyError.
    """

    def __init__(self, numbers: Iterable[Node], equal: Callable[[Node, Node], bool]) -> None:
        ends = {end for node in (_INFINITY, *numbers) for end in (node, _opposite(node))}
        known = [(value, end) for end in ends if (value := approximate(end)) is not None]
        known.sort(key=lambda pair: pair[0])
        self.place_of: dict[Node, int] = {}
        place, last = -1, known[0]
        for value, end in known:
            near = value == last[0] or abs(value - last[0]) <= 1e-9 * (1 + abs(value))
            place += 0 if place > 0 and near and (end == last[1] or equal(last[1], end)) else 2
            self.place_of[end], last = place, (value, end)
        self.whole = frozenset(range(2, place))

    def places(self, answer: Answer) -> Places:
        """What of the line is in the set that an answer describes."""
        match answer:
            case Leaf(text=r"\mathbb{R}"):
                return self.whole
            case Group(brackets="()" | "[]" | "(]" | "[)" as brackets, items=(low, high)):
                inside = range(self._place(low) + (brackets[0] == "("), self._place(high) + (brackets[1] == "]"))
                if inside and self.whole.issuperset(inside):
                    return frozenset(inside)
                raise KeyError  # `[-\infty, 0)` is not the half line, and `(3,1)` is a pair
            case Chain(items=(Leaf(node=Node(kind="symbol")), values), signs=(r"\in",)):
                return self.places(values)
            case Chain(items=items, signs=signs) if answer.is_relation:
                names, solved = zip(*map(self._solutions, items, signs, items[1:]), strict=True)
                if len(set(names)) == 1:
                    return reduce(and_, solved)
            case Chain(items=items, signs=signs):
                places = self.places(items[0])
                for sign, part in zip(signs, items[1:], strict=True):
                    places = _OPERATORS[sign](places, self.places(part))
                return places
            case Many(braced=True, items=items):
                return frozenset(map(self._place, items))
            case Many(items=items, joint=joint) if all(isinstance(item, Chain) for item in items):
                if len({name for item in items if isinstance(item, Chain) for name in _names(item)}) > 1:
                    raise KeyError  # `x>1, y>2` is a part of the plane
                return reduce(or_ if joint == "or" else and_, map(self.places, items))
        raise KeyError

    def _place(self, item: Answer) -> int:
        if isinstance(item, Leaf) and item.node is not None and not (item.percent or item.degrees):
            return self.place_of[item.node]
        raise KeyError

    def _solutions(self, left: Answer, sign: str, right: Answer) -> tuple[Node, Places]:
        """The name and the solutions of `name sign constant` and `|name| sign constant`, with sides in any order."""
        if isinstance(right, Leaf) and right.node is not None and letters(right.node):
            left, sign, right = right, _FLIPPED[sign], left
        end = self._place(right)
        match left, right:
            case Leaf(node=Node(kind="symbol") as name), _:
                return name, self._half(sign, end)
            case Leaf(node=Node(value="abs", args=(Node(kind="symbol") as name,))), Leaf(node=Node() as node):
                operator = or_ if sign in (">", r"\ge") else and_
                return name, operator(self._half(sign, end), self._half(_FLIPPED[sign], self.place_of[_opposite(node)]))
        raise KeyError

    def _half(self, sign: str, end: int) -> Places:
        match sign:
            case "<":
                return frozenset(place for place in self.whole if place < end)
            case ">":
                return frozenset(place for place in self.whole if place > end)
            case r"\le" | r"\ge":
                return self._half("<" if sign == r"\le" else ">", end) | ({end} & self.whole)
            case r"\ne":
                return self.whole - {end}
        raise KeyError


def _names(chain: Chain) -> set[str]:
    leaves = [side.node for side in chain.items if isinstance(side, Leaf) and side.node is not None]
    return set[str]().union(*map(letters, leaves))


def _opposite(node: Node) -> Node:
    return node.args[0] if node.kind == "negate" else negated(node)

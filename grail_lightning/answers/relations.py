r"""What relations say: which sides only name what the others are, and the set of real numbers that they describe."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from fractions import Fraction
from functools import reduce
from operator import and_, eq, ge, gt, le, lt, ne, or_, sub

from grail_lightning.answers.lexicon import MULTIPLIED
from grail_lightning.answers.normalise import ELEMENTARY, GREEK, TRIGONOMETRIC
from grail_lightning.answers.parse import DERIVATIVE, DIFFERENTIABLE, Node, letters, negated, number
from grail_lightning.answers.quantity import NOTHING, Said
from grail_lightning.answers.shapes import Answer, Atom, Chain, Group, Many, Words
from grail_lightning.answers.values import Undefined, approximate, rational

# What a name is applied to: `(2)`, `(A\mid B)`, `(X\ge 2)`, `[X]`, `(g(2))`.
_ARGUMENT = r"(?:[A-Za-z0-9_^,;.|'\s\\{}=<>+-]|\([A-Za-z0-9]\))*"
_VECTOR = (
    r"\\(?:bar|hat|vec|tilde|overline|overrightarrow|mathbf)(?:\{(?:[A-Za-z]|[A-Z]{2,3})\}|\s[A-Za-z](?![A-Za-z]))"
)
_COMPLEX = r"[zw](?:_[0-9])?"
_SETS = r"[A-Z](?:'|_[0-9])?(?:\s?\\(?:cap|cup|setminus|times)\s?[A-Z](?:'|_[0-9])?)+"
_SIZE = (
    rf"\\\|[^|=<>]+\\\||\|(?:[A-Z]{{1,2}}|{_SETS}|{_VECTOR}(?:\s?[+-]\s?{_VECTOR})*"
    rf"|{_COMPLEX}(?:\s?[+-]?\s?{_COMPLEX})*)\|"
)
_OF_VALUE = (
    r"[A-Za-z ]+\sof(?:\s(?:the\s)?[a-z]+)?|[Aa]rea|[Vv]olume|[Pp]erimeter|[Ll]ength|[Aa]ngle"
    r"|[Mm]ax|[Mm]in|[Rr]ank|[Tt]race|tr"
)
_ANGULAR = "|".join(TRIGONOMETRIC)
_COMMAND = rf"\\(?!frac|sqrt|pi|infty|{_ANGULAR}|l[no]|exp|int|sum|text)[a-zA-Z]+"
_NAME = re.compile(
    rf"""(?:m?\\(?:angle|triangle)\s?|\\(?:det|dim|max|min|sup|inf|deg|ker|arg|Re|Im|lim)(?:_\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|_[A-Za-z0-9])?\s?(?:\\(?:ker|dim|det)\s?)?
      |\\text\{{(?:{_OF_VALUE})\s?\}}\s?(?=[A-Z]|\\triangle)(?:\\triangle\s?)?)?
    (?P<head>\\\#\s?[A-Z]|\\text\{{[A-Za-z][^{{}}]*\}}|\\mathbb\{{[A-Z]\}}|{_VECTOR}|{_SIZE}|{DERIVATIVE}|\[[A-Z]{{3,6}}\]|[A-Z]{{2,5}}
      |[A-Za-z]{{3,}}(?:\s(?:of|[A-Za-z]{{3,}}))*|[A-Za-z]|{_COMMAND})
    (?:'|\^\*|\^\{{\*\}}|_\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|_\\text\{{[^{{}}]*\}}|_[A-Za-z0-9]|(?<![xyzt])\^\{{-1\}}(?=\s?[(\[]|$)|(?<=[{DIFFERENTIABLE}])\^\{{\([0-9n]\)\}})*
    (?P<argument>\s?\({_ARGUMENT}\)|\[{_ARGUMENT}\])?""",
    re.VERBOSE,
)
# A head that has a sum, a product or a power as its argument only if it is the usual name of a function, or a word.
_FUNCTION = re.compile(
    r"[fghEFGHPQ]|\\text.*|\\mathbb.*|(?![A-Z]+$|[a-z]{3}$)[A-Za-z\s]{3,}|\\(?:phi|psi|sigma|tau|mu|omega|zeta|[A-Z][a-z]+|Pr)"
)
_ARITHMETIC = re.compile(r"[A-Za-z0-9}]\s*[+-]|[0-9]\s*[A-Za-z]|[A-Za-z]\s*\^\{?[0-9]|\\frac[0-9{}\s]*[A-Za-z]")
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_RATIO = re.compile(rf"\\frac{_GROUP}{_GROUP}|([^/]*)/(.*)", re.DOTALL)
_ANGLE = r"[2-9]?\s?(?:\\angle\s?[A-Z]{1,3}|[A-Z]|\\(?:alpha|beta|gamma|delta|theta|phi|psi|omega)(?![a-zA-Z]))"
# A function of an angle that has a name: `\sin x=7` is an equation to be solved.
_OF_ANGLE = re.compile(
    rf"\\(?:{_ANGULAR})\s?(?:\^\{{?[2-9]\}}?\s?)?"
    rf"(?:\(?{_ANGLE}(?:\s?[+-]\s?{_ANGLE})*\)?|\(?\\frac\{{{_ANGLE}\}}\{{[2-9]\}}\)?)"
)
# In small letters: `NO` is a segment.
_NO_NAME = re.compile(
    rf"\b(?:{'|'.join(ELEMENTARY)}|sqrt|[Nn]ot?|[Nn]ever|[Nn]either|nor|isn't|cannot|false|wrong|[Hh]alf|[Tt]wice|[Dd]ouble)\b"
)
# A letter without a value of its own (`e_1` has none, e and i have), or a segment; possessive, so linear on any text.
_SYMBOL = (
    rf"(?:{_VECTOR}|m?\\angle\s?[A-Z]{{1,3}}|\\overline\{{[A-Z]{{2}}\}}|[A-Z]++|(?![ei](?![_']))[a-z]"
    rf"|\\(?:{'|'.join(GREEK)})(?![a-zA-Z]))(?:_\{{[A-Za-z0-9]++\}}|_[A-Za-z0-9]|')*+"
)
_SUM_OR_PRODUCT = re.compile(rf"{_SYMBOL}(?:(?:\s?[+-]\s?{_SYMBOL})++|(?:\s?\*?\s?{_SYMBOL})++)")


def _is_name(source: str) -> bool:
    r"""Whether a side of an equation only names what the other is: `x`, `T_{4}`, `f(x)`, `\text{Volume}`, `(x,y)`."""
    source = source.strip()
    if _OF_ANGLE.fullmatch(source):
        return True
    if source.startswith("(") and source.endswith(")"):
        return all(map(_is_name, source[1:-1].split(",")))
    return all(map(_is_one_name, source.split(":")))


# A limit of anything is a name, as is the extremum of a set.
_SCRIPTS = r"(?:[_^]\{(?:[^{}]|\{[^{}]*\})*\}|[_^][A-Za-z0-9]|[_^]\\[a-z]+ ?)*"
_LIMIT = re.compile(
    rf"\\lim{_SCRIPTS}(?=.*[A-Za-z]).+|\\(?:max|min|sup|inf)\s?\\\{{[^{{}}]*[A-Za-z][^{{}}]*\\\}}"
    rf"|\(?[a-z]\s?\\circ\s?[a-z]\)?\([A-Za-z0-9-]+\)|\\i*int{_SCRIPTS}\s?[fghFG]\([a-z]\)\s?d[a-z]|\\(?:sum|prod){_SCRIPTS}\s?[A-Za-z]_\{{?[a-z]\}}?"
)


def _is_one_name(part: str) -> bool:
    if _LIMIT.fullmatch(part.strip()):
        return True
    name = _NAME.fullmatch(part.strip())
    if name is None or _NO_NAME.search(part) or MULTIPLIED.search(part):
        return False
    # A bracket may be a factor: `x(x+1)` and `a(b+c)` are products, `f(x+1)`, `f(f(2))` and `P(A)` are names.
    head, argument = name["head"], name["argument"] or ""
    if re.search(rf"(?<![A-Za-z\\]){re.escape(head)}(?![A-Za-z(_])", argument):
        return False
    return bool(_FUNCTION.fullmatch(head)) or "," in argument or not _ARITHMETIC.search(argument)


def _is_combined(source: str, sums: bool) -> bool:
    r"""Whether a side is the quotient of two names or, with `sums`, a sum, a difference or a product of different ones.

    With a number or a power in it, as `2x+3y` and `x^2+y^2`, it is the side of a curve's equation.
    """
    source = source.strip()
    if ratio := _RATIO.fullmatch(source):
        return all(_is_one_name(name) for name in ratio.groups() if name is not None)
    if not sums or not _SUM_OR_PRODUCT.fullmatch(source) or _NO_NAME.search(source):
        return False
    symbols = re.findall(_SYMBOL, source)
    return len(set(symbols)) == len(symbols)


def named_sides(relation: Chain, value: Answer | None = None) -> list[bool]:
    """Of each side whether it only names the others; at least one side is always a value.

    A ratio of quantities is a name where there is no simpler one: the value of `x=a/b` is the ratio. So are sums and
    products where an equation is to say a number other than 0.
    """
    sums = isinstance(value, Atom) and is_number(value) and value.node != number(0) and set(relation.signs) == {"="}
    named = [_is_name(source) for source in relation.sources]
    if not any(named):
        named = [_is_combined(source, sums) for source in relation.sources]
    if all(named):  # `x = y`: a formula that happens to look like a name
        named = [*named[:-1], False]
    return named


def named_value(relation: Chain) -> Answer | None:
    """What a relation says of its name, or None if it is more than a name and a value.

    `m+n=113` says 113. With coordinates alone, `x+y=113` is a line.
    """
    line = all(re.fullmatch(r"[xyz\s+-]*|[0-9.\s-]*", source) for source in relation.sources)
    named = named_sides(relation, None if line else relation.items[-1])
    if set(relation.signs) <= {"=", r"\in"} and named[0]:
        return relation.items[-1]
    return relation.items[0] if relation.signs == ("=",) and named[1] else None


def is_number(answer: Answer) -> bool:
    """Whether an answer is a formula without letters."""
    return isinstance(answer, Atom) and answer.node is not None and not letters(answer.node)


_MOST_WHOLE = 200
_COMPARED: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<": lt,
    ">": gt,
    r"\le": le,
    r"\ge": ge,
    r"\ne": ne,
    "=": eq,
}


def finite_set(answer: Answer) -> Answer:
    r"""`\{1,2,3\}` for `\{x\in\mathbb{Z} : 0<x<4\}`, if its numbers are few and small; any other answer as it is."""
    match answer:
        case Group(
            ":", (Chain(items=(Atom(node=Node("symbol") as name), Atom(text=kind)), signs=(r"\in",)), condition)
        ):
            conditions = condition.items if isinstance(condition, Many) else (condition,)
        case Group(":", (Atom(node=Node("symbol") as name), Many(items=items))):
            kinds = [item.items[1] for item in items if isinstance(item, Chain) and item.signs == (r"\in",)]
            conditions = tuple(item for item in items if not (isinstance(item, Chain) and item.signs == (r"\in",)))
            if len(kinds) != 1 or not isinstance(kinds[0], Atom):
                return answer
            kind = kinds[0].text
        case _:
            return answer
    lowest = {r"\mathbb{Z}": -_MOST_WHOLE, r"\mathbb{Z}^{+}": 1, r"\mathbb{Z}^+": 1, r"\mathbb{N}": 0}.get(kind)
    relations = [item for item in conditions if isinstance(item, Chain) and _COMPARED.keys() >= {*item.signs}]
    if lowest is None or len(relations) != len(conditions) or not relations:
        return answer
    members = [n for n in range(lowest, _MOST_WHOLE + 1) if all(_holds(relation, name, n) for relation in relations)]
    if (
        not members
        or members[0] == -_MOST_WHOLE
        or members[-1] == _MOST_WHOLE
        or (kind == r"\mathbb{N}" and 0 in members)
    ):
        return answer
    return Many(tuple(Atom(str(n), node=number(n)) for n in members), braced=True)


def _holds(relation: Chain, name: Node, value: Fraction | int) -> bool:
    sides = [
        rational(_put(side.node, name, value)) if isinstance(side, Atom) and side.node else None
        for side in relation.items
    ]
    pairs = zip(sides, relation.signs, sides[1:], strict=False)
    return all(left is not None and right is not None and _COMPARED[sign](left, right) for left, sign, right in pairs)


def _put(node: Node, name: Node, value: Fraction | int) -> Node:
    return number(value) if node == name else node._replace(args=tuple(_put(part, name, value) for part in node.args))


def determinant(rows: Answer) -> Node | None:
    """The value of a determinant of at most four rows, as a formula; None if it is none."""
    items = rows.items if isinstance(rows, Group) else ()
    cells = [[cell.node for cell in row.items if isinstance(cell, Atom)] for row in items if isinstance(row, Group)]
    whole = [[node for node in row if node is not None] for row in cells]
    if not 1 <= len(whole) <= 4 or any(len(row) != len(whole) for row in whole):
        return None
    return _expanded(whole)


def _expanded(rows: list[list[Node]]) -> Node:
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for place, factor in enumerate(rows[0]):
        minor = _expanded([[*row[:place], *row[place + 1 :]] for row in rows[1:]])
        term = Node("multiply", "", (factor, minor))
        terms.append(negated(term) if place % 2 else term)
    return Node("add", "", tuple(terms))


_TRIED = [Fraction(n, 6) for n in (-60, -25, -13, -7, -3, -1, 1, 2, 5, 9, 14, 31, 66)]


def equal_by_cases(one: Answer, two: Answer) -> bool:
    """Whether functions of a letter, one of which goes by cases, have the same rational values where they are tried."""
    cases = [answer for answer in (one, two) if isinstance(answer, Group)]
    names = {name for answer in cases for row in answer.items if isinstance(row, Group) for name in _conditioned(row)}
    if len(names) != 1:
        return False
    name = Node("symbol", names.pop())
    ends = {rational(node) for answer in cases for node in _numbers(answer)} - {None}
    tried = [*_TRIED, *(end for end in ends if end is not None)]
    values = [(_value_of(one, name, point), _value_of(two, name, point)) for point in tried]
    pairs = [pair for pair in values if pair != (None, None)]
    return len(pairs) > len(tried) // 2 and all(first is not None and first == second for first, second in pairs)


def _conditioned(row: Group) -> set[str]:
    return _names(row.items[1]) if isinstance(row.items[1], Chain) else set()


def _value_of(answer: Answer, name: Node, point: Fraction) -> Fraction | None:
    """The value at a point; None where there is none, or none that is rational."""
    if isinstance(answer, Atom) and answer.node is not None and answer.said == NOTHING:
        with suppress(Undefined):
            return rational(_put(answer.node, name, point))
    if not isinstance(answer, Group) or answer.brackets != "cases":
        return None
    values, rest = set(), None
    for row in answer.items:
        value, condition = row.items if isinstance(row, Group) else (row, row)
        if isinstance(condition, Words) and condition.text in ("otherwise", "else"):
            rest = value
        elif isinstance(condition, Chain) and _COMPARED.keys() >= {*condition.signs} and _holds(condition, name, point):
            values.add(_value_of(value, name, point))
    if not values and rest is not None:
        return _value_of(rest, name, point)
    return values.pop() if len(values) == 1 else None


_FLIPPED = {"=": "=", "<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
_OPERATORS = {r"\cup": or_, r"\cap": and_, r"\setminus": sub}
_INFINITY = Node("constant", "inf")
_Places = frozenset[int]


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
        case Atom(node=Node() as node) if not letters(node):
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
        approximations = [(value, end) for end in ends if (value := approximate(end)) is not None]
        approximations.sort(key=lambda pair: pair[0])
        self.place_of: dict[Node, int] = {}
        place, last = -1, approximations[0]
        for value, end in approximations:
            near = value == last[0] or abs(value - last[0]) <= 1e-9 * (1 + abs(value))
            place += 0 if place > 0 and near and (end == last[1] or equal(last[1], end)) else 2
            self.place_of[end], last = place, (value, end)
        self.whole = frozenset(range(2, place))

    def places(self, answer: Answer) -> _Places:
        """What of the line is in the set that an answer describes."""
        match answer:
            case Atom(text=r"\mathbb{R}", said=Said("", True, "")):
                return self.whole
            case Group(brackets="()" | "[]" | "(]" | "[)" as brackets, items=(low, high)):
                inside = range(self._place(low) + (brackets[0] == "("), self._place(high) + (brackets[1] == "]"))
                if inside and self.whole.issuperset(inside):
                    return frozenset(inside)
                raise KeyError  # `[-\infty, 0)` is not the half line, and `(3,1)` is a pair
            case Chain(items=(Atom(node=Node(kind="symbol")), values), signs=(r"\in",)):
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
                if joint != "or" and any("=" in item.signs for item in items if isinstance(item, Chain)):
                    raise KeyError  # a list of values, not what is all of them at once
                if len({name for item in items if isinstance(item, Chain) for name in _names(item)}) > 1:
                    raise KeyError  # `x>1, y>2` is a part of the plane
                return reduce(or_ if joint == "or" else and_, map(self.places, items))
        raise KeyError

    def _place(self, item: Answer) -> int:
        if isinstance(item, Atom) and item.node is not None and item.said.bare and not (item.percent or item.degrees):
            return self.place_of[item.node]
        raise KeyError

    def _solutions(self, left: Answer, sign: str, right: Answer) -> tuple[Node, _Places]:
        """The name and the solutions of `name sign constant` and `|name| sign constant`, with sides in any order."""
        if isinstance(right, Atom) and right.node is not None and letters(right.node):
            left, sign, right = right, _FLIPPED[sign], left
        end = self._place(right)
        match left, right:
            case Atom(said=Said("", True, ""), node=Node(kind="symbol") as name), _:
                return name, self._half(sign, end)
            case (
                Atom(said=Said("", True, ""), node=Node(value="abs", args=(Node(kind="symbol") as name,))),
                Atom(node=Node() as node),
            ):
                operator = or_ if sign in (">", r"\ge") else and_
                return name, operator(self._half(sign, end), self._half(_FLIPPED[sign], self.place_of[_opposite(node)]))
        raise KeyError

    def _half(self, sign: str, end: int) -> _Places:
        match sign:
            case "=":
                return frozenset({end} & self.whole)
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
    leaves = [side.node for side in chain.items if isinstance(side, Atom) and side.node is not None]
    return set[str]().union(*map(letters, leaves))


def _opposite(node: Node) -> Node:
    return node.args[0] if node.kind == "negate" else negated(node)

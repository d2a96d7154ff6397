"""Are two formulas equal? What counts as equal is in `Conventions`."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from grail_lightning.answers.library import equal_by_math_verify
from grail_lightning.answers.normalise import TEXT, string_key
from grail_lightning.answers.parse import Node, Unreadable, letters, number, parse
from grail_lightning.answers.quantity import agree
from grail_lightning.answers.shapes import Atom
from grail_lightning.answers.values import agree_everywhere, rational

LAYERS = ("string", "number", "structure", "symbolic", "math-verify")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conventions:
    """What counts as equal where people differ.

    Args:
        tolerance: relative error within which a decimal of four or more digits stands for a number that no decimal can
            write exactly (1/3, a root). Two numbers that decimals can write must be equal exactly.
        missing_unit: accept a number without its unit, or with one that the reference does not have; two known units
            must agree in any case.
    """

    tolerance: float = 1e-6
    missing_unit: bool = True


_MOST_CHARACTERS = 2000
_MOST_NESTED = 30
_TOO_LARGE = re.compile(r"\0|\d{1001}|[eE][+-]?0*\d{4}")
_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)
_WORDY = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{4,}|\?|\"")
_HUNDREDTH = number(Fraction(1, 100))
_CONSTANTS = [Node("symbol", name) for name in "ckK"]
_DEGREE = Node("function", "degrees", (number(1),))


def capped(text: str) -> bool:
    """Whether a text is too large in one way or another for anything that parses."""
    if len(text) > _MOST_CHARACTERS or _TOO_LARGE.search(text):
        return True
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths, default=0) > _MOST_NESTED


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

    def leaves(self, gold: Atom, other: Atom) -> bool:
        """Two formulas with what surrounds them."""
        if not agree(gold.said, other.said, missing=self.conventions.missing_unit):
            return self.with_letters(gold, other)
        same_measure = gold.degrees == other.degrees or not (_in_radians(gold) or _in_radians(other))
        if same_measure and gold.percent == other.percent and string_key(gold.text) == string_key(other.text):
            return True
        if _anagrams(gold.text, other.text):
            return False
        if gold.node is None or other.node is None:
            if not gold.said.known:  # words, of which the grammar reads a part
                raise Unparseable
            return self.unknown(gold.text, other.text, other.node is None)
        # The tolerance is for pairs of which exactly one is a decimal, of four or more digits.
        decimals = [_significant_digits(atom.text) for atom in (gold, other)]
        slack = self.conventions.tolerance if max(decimals) >= 4 and min(decimals) == 0 else 0.0
        if other.text.endswith(r"\ldots") and not gold.text.endswith(r"\ldots"):  # no finite decimal goes on
            value = rational(gold.node)
            if not slack or (value is not None and _is_terminating(value)):
                return False
        if any(self.nodes(ours, theirs, slack) for ours, theirs in _readings(gold, other, gold.node, other.node)):
            return True
        return self.with_letters(gold, other)

    def with_letters(self, gold: Atom, other: Atom) -> bool:
        r"""Whether the letters of one formula are the unit of the other: `25m^2` is `25\text{ m}^2`."""
        quantity, formula = (gold, other.node) if gold.said.kind else (other, gold.node)
        if bool(gold.said.kind) == bool(other.said.kind) or formula is None or not letters(formula):
            return False
        return any(self.nodes(whole, formula) for whole in _with_unit(quantity))

    def nodes(self, gold: Node, other: Node, slack: float = 0.0) -> bool:
        """Two formulas."""
        value, other_value = rational(gold), rational(other)
        if gold == other:  # two spellings of one formula
            self.reach("structure" if value is None else "number")
            return True
        if value is not None and other_value is not None:
            self.reach("number")
            if value == other_value or slack == 0 or (_is_terminating(value) and _is_terminating(other_value)):
                return value == other_value
            return abs(value - other_value) <= Fraction(str(slack)) * abs(value)
        if gold.kind == other.kind == "symbol":
            return False
        self.reach("symbolic")
        return agree_everywhere(gold, other, slack)

    def unknown(self, left: str, right: str, prediction_unknown: bool) -> bool:
        """Two texts, one of which is outside of the grammar; no mathematical library should see words."""
        if _WORDY.search(left) or _WORDY.search(right):
            if prediction_unknown:
                raise Unparseable
            return False
        self.reach("math-verify")
        verdict = equal_by_math_verify(left, right, self.conventions.tolerance)
        if verdict is None:
            raise Unparseable
        return verdict


def same_form(one: Node, two: Node) -> bool:
    """Whether two formulas without letters are the same tree, or two spellings of one number such as 1/2 and 0.5."""
    return one == two or (_spelled(one) and _spelled(two) and rational(one) == rational(two))


def _spelled(node: Node) -> bool:
    return node.kind == "number" or (node.kind in ("negate", "divide") and all(map(_spelled, node.args)))


def _anagrams(first: str, second: str) -> bool:
    """Whether two texts are words of the same letters, which a letter that comes twice tells from products: `SAS`."""
    if first != second and all(re.fullmatch("[IVX]+", text) for text in (first, second)):  # Roman numerals.
        return True
    words = [text.lower() for text in (first, second) if text.isascii() and text.isalpha() and len(text) > 2]
    return len(words) == 2 and words[0] != words[1] and len(set(words[0])) < len(words[0])


def _readings(left: Atom, right: Atom, first: Node, second: Node) -> Iterator[tuple[Node, Node]]:
    """What two formulas say.

    `28%` is 28 and 0.28. Degrees are numbers, unless the other side is in radians. In functions of x, t, u, y or z
    `+k` may be `+C`.
    """
    if left.percent != right.percent:
        yield first, second
        yield (_times(first, _HUNDREDTH), second) if left.percent else (first, _times(second, _HUNDREDTH))
    elif left.degrees and _in_radians(right):
        yield _times(first, _DEGREE), second
    elif right.degrees and _in_radians(left):
        yield first, _times(second, _DEGREE)
    else:
        yield first, second
        differ, common = letters(first) ^ letters(second), letters(first) & letters(second)
        if "C" in differ and len(differ) == 2 and differ <= {*"CckK"} and common and common <= {*"xtuyz"}:
            yield _with_constant(first), _with_constant(second)


def _with_unit(atom: Atom) -> Iterator[Node]:
    r"""The formula with its unit as letters: `25m^2` is `25\text{ m}^2` and `25\text{ square meters}`."""
    kind = atom.said.kind
    symbols = kind.upper() if kind in ("l", "v") else re.sub(r"(?<=\^)-?\d", r"{\g<0>}", kind)
    texts = [
        TEXT.sub(r" \1 ", atom.whole),
        *([f"{atom.text} {symbols}"] if atom.said.bare and not atom.said.qualifier else []),
    ]
    for text in texts:
        with suppress(Unreadable):
            yield parse(text)


def _with_constant(node: Node) -> Node:
    """The formula with C for c, k or K where one of them is a term of its sum, as constants of integration are."""
    if node.kind != "add":
        return node
    return node._replace(args=tuple(Node("symbol", "C") if term in _CONSTANTS else term for term in node.args))


def _times(node: Node, factor: Node) -> Node:
    return Node("multiply", "", (node, factor))


def _in_radians(atom: Atom) -> bool:
    return not atom.degrees and (atom.said.kind == "rad" or r"\pi" in atom.text)


def _is_terminating(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion: twos and fives divide its denominator, and nothing else."""
    bits = value.denominator.bit_length()
    return bits <= 4096 and 10**bits % value.denominator == 0


def _significant_digits(text: str) -> int:
    """Digits of a decimal literal from the first that is not zero; 0 for anything else."""
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    return len(match[1].replace(".", "").lstrip("0")) if match else 0

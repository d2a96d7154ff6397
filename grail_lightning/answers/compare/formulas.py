"""Small questions about one formula that decide how two are compared."""

import re
from fractions import Fraction

from grail_lightning.answers.compare.conventions import Conventions
from grail_lightning.answers.compare.exact import rational
from grail_lightning.answers.grammar.nodes import Node, number
from grail_lightning.answers.grammar.units import Quantity

__all__ = [
    "anagrams",
    "cut_off",
    "factors_between",
    "infinite",
    "scaled_by_zeros",
    "sign_of_infinity",
    "significant_digits",
    "single",
    "slack_between",
    "times",
    "wordy",
]


def single(node: Node) -> bool:
    """Whether a formula is one letter, possibly with a rational factor: never equal to a number."""
    return node.kind == "symbol" or (
        node.kind in ("negate", "multiply")
        and all(single(argument) or argument.kind == "number" for argument in node.args)
        and sum(single(argument) for argument in node.args) == 1
        and all(argument.value != 0 for argument in node.args if argument.kind == "number")
    )


def same_form(one: Node, two: Node) -> bool:
    """Whether two formulas without letters are the same tree, or two spellings of one number such as 1/2 and 0.5."""
    return one == two or (_spelled(one) and _spelled(two) and rational(one) == rational(two))


def _spelled(node: Node) -> bool:
    return node.kind == "number" or (node.kind in ("negate", "divide") and all(map(_spelled, node.args)))


def infinite(node: Node) -> bool:
    """Whether infinity occurs in a formula."""
    return (node.kind == "constant" and node.value == "inf") or any(infinite(argument) for argument in node.args)


def sign_of_infinity(node: Node) -> int:
    """1 or -1 for a signed infinity, 0 for anything else."""
    if node == Node("constant", "inf"):
        return 1
    return -sign_of_infinity(node.args[0]) if node.kind == "negate" else 0


def scaled_by_zeros(node: Node, zeros: int) -> Node:
    """The formula times ten to the power of `zeros`."""
    return Node("multiply", "", (node, number(10**zeros))) if zeros else node


def times(node: Node, factor: Node | None) -> Node:
    """The product; None is one."""
    return node if factor is None else Node("multiply", "", (node, factor))


_DECIMAL = re.compile(r"[+-]?([0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+|\*10\^\{?-?[0-9]+\}?|\\ldots)?", re.ASCII)
_WORDY = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{4,}|\?|\"")


def significant_digits(text: str) -> int:
    """Digits of a decimal literal from the first that is not zero; 0 for anything else."""
    found = _DECIMAL.fullmatch(text.replace(" ", ""))
    return len(found[1].replace(".", "").lstrip("0")) if found else 0


def cut_off(text: str) -> bool:
    """Whether a text is a decimal whose digits go on, which no finite decimal is."""
    return text.endswith(r"\ldots")


def anagrams(one: str, two: str) -> bool:
    """Whether two texts are words of the same letters, which a letter that comes twice tells from products: `SAS`."""
    words = [text.lower() for text in (one, two) if text.isascii() and text.isalpha() and len(text) > 2]
    return len(words) == 2 and words[0] != words[1] and len(set(words[0])) < len(words[0])


def wordy(text: str) -> bool:
    """Whether a formula that cannot be read has words in it, which no mathematical library should see."""
    return bool(_WORDY.search(text))


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

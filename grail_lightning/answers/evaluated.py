r"""Is a right answer worked out, or is it the question? `37*48` is equal to 1776, but a policy learns to copy it.

Asked of answers that are right, where the reference is a rational number that is worked out itself, or a list, a tuple
or a set of such. Nothing is computed from the answer: its tree is walked once.
"""

import re
from collections.abc import Set
from fractions import Fraction

from grail_lightning.answers.compare import capped
from grail_lightning.answers.normalise import FUNCTIONS, TEXT, normalise
from grail_lightning.answers.parse import Node, subtrees
from grail_lightning.answers.relations import is_number, named_sides, named_value
from grail_lightning.answers.shapes import Answer, Atom, Chain, Group, Many
from grail_lightning.answers.structure import read
from grail_lightning.answers.values import TooLarge, Undefined, rational

# The sign of a division is that of an operation, where a slash may be that of a fraction: it is read as a factor.
_DIVISION = re.compile(r"÷|\\div(?![A-Za-z])")
_MATRICES = ("matrix", "determinant")  # The factor before a matrix is a way to write it.
_COUNTS = frozenset(["factorial", "double factorial", "binomial"])
_NAMES = (
    "sum prod coprod int iint iiint oint lim liminf limsup mod bmod gcd lcm max min sup det sqrt lfloor lceil partial"
)
# What is looked for in a formula that the grammar does not cover. Behind a sign there is an operand, too.
_OPERATION = re.compile(
    rf"\\(?:{'|'.join([*_NAMES.split(), *sorted(FUNCTIONS)])})(?![A-Za-z])|\\begin|\\frac\s*\{{d\}}"
    r"|[0-9)}\]!%]\s*[+*-]\s*[0-9.({\\]"
)
_SCIENTIFIC = re.compile(r"(?<=[0-9])\s*\*\s*10\s*\^")


def unevaluated(gold: str, prediction: str) -> bool:
    r"""Whether a right answer to a question about rational numbers could still be carried out, such as `7+5` for 12.

    True for sums, differences and products of numbers, for `\sum`, `\int`, `\lim` and `\bmod`, and for functions such
    as `\sqrt{64}`. False for fractions, powers, scientific notation, factorials, binomial coefficients and their
    products and quotients, for an equation of which one side is worked out, and where the reference is not worked out.

    Args:
        gold: The reference.
        prediction: The bare answer, which is equal to the reference.
    """
    if gold.strip() == prediction.strip() or capped(gold) or capped(prediction):
        return False
    try:
        is_request = _is_asked(read(normalise(gold)))
        return is_request and not _is_evaluated(read(normalise(_DIVISION.sub("*1/", prediction))))
    except (TooLarge, Undefined, RecursionError):  # what the verifier found equal has none of these
        return False


def _is_asked(gold: Answer) -> bool:
    """Whether a reference is a rational number that is worked out, or consists of such."""
    match gold:
        case Atom(node=Node() as formula):
            return _is_worked_out(formula) and rational(formula) is not None
        case Group(brackets=brackets) if brackets in _MATRICES:
            return False
        case Group(items=items) | Many(items=items):
            return bool(items) and all(map(_is_asked, items))
        case Chain(is_relation=True):
            value = named_value(gold)
            return value is not None and _is_asked(value)
    return False


def _is_evaluated(answer: Answer) -> bool:
    match answer:
        case Atom(node=None):
            return not _OPERATION.search(_SCIENTIFIC.sub("", TEXT.sub(" ", answer.text)))
        case Atom(node=Node() as formula):
            return _is_worked_out(formula)
        case Chain(is_relation=True):
            return any(map(_is_evaluated, _stated(answer)))
        case Group(brackets=brackets) if brackets in _MATRICES:
            return True
        case Group() | Many() | Chain():
            return all(map(_is_evaluated, answer.items))
    return True


def _stated(relation: Chain) -> list[Answer]:
    r"""The sides of an equation that are judged: no names, no formulas of names, and nothing behind `\approx` alone."""
    named = named_sides(relation)
    sides = [side for side, name in zip(relation.items, named, strict=True) if not name]
    numbers = [side for side in sides if not isinstance(side, Atom) or side.node is None or is_number(side)]
    sides = numbers or sides  # `x=5 m`: a letter is the unit
    return sides[:1] if relation.signs == (r"\approx",) else sides


def _is_worked_out(formula: Node) -> bool:
    """Whether each part of a formula may stand in a number that is written down, in one walk from its leaves."""
    counts, names = set[int](), set[int]()  # Parts by identity: products of factorials, and of letters, such as units.
    seen = set[Fraction | str]()
    for part in reversed([*subtrees(formula)]):
        # The exponent is no factor.
        factors = {id(argument) for argument in part.args[: 1 if part.kind == "power" else None]}
        joined = part.kind in ("multiply", "divide", "power")
        if (part.kind == "function" and part.value in _COUNTS) or (joined and factors <= counts):
            counts.add(id(part))
        elif part.kind == "symbol" or part == _PI:
            if part.value in seen:  # `12x/x`, `\frac{d}{dx}(12x)`: letters that cancel
                return False
            names.add(id(part))
            seen.add(part.value)
        elif joined and factors <= names:
            names.add(id(part))
        elif not _may_stand(part, names):
            return False
    return True


_PI = Node("constant", "pi")  # A reference in degrees may be answered in radians.


def _may_stand(part: Node, names: Set[int]) -> bool:
    """Whether a part of a formula, of which its own parts are worked out, is; `names` are the parts without numbers."""
    kinds = [_unsigned(argument).kind for argument in part.args]
    match part.kind:
        case "number" | "sign":
            return True
        case "negate":
            return part.args[0].kind != "negate"
        case "divide":
            return "divide" not in kinds
        case "power":
            exponent = _unsigned(part.args[1])
            whole = exponent.kind == "power" or (exponent.kind == "number" and _is_whole(exponent))
            return whole and kinds[0] in ("number", "divide", "power")
        case "multiply":
            return any(id(factor) in names for factor in part.args) or _is_scientific(*part.args)
    return part.value == "degrees"


def _is_scientific(first: Node, second: Node) -> bool:
    """`3*10^8`, or the factors the other way round."""
    number, power = (second, first) if first.kind == "power" else (first, second)
    return _unsigned(number).kind == "number" and power.kind == "power" and power.args[0].value == 10


def _is_whole(node: Node) -> bool:
    return not isinstance(node.value, str) and node.value.denominator == 1


def _unsigned(node: Node) -> Node:
    return node.args[0] if node.kind == "negate" else node

"""The tree of a formula."""

from fractions import Fraction
from typing import NamedTuple

__all__ = ["Node", "has_sign", "letters", "negated", "number", "signed"]


class Node(NamedTuple):
    """A formula: `kind` is number | symbol | constant | add | multiply | divide | power | negate | function | sign.

    Args:
        kind: what it is; `sign` is a plus-minus that applies to its one operand.
        value: of a number (a Fraction), or the name.
        args: operands.
    """

    kind: str
    value: Fraction | str
    args: tuple["Node", ...] = ()


def number(value: Fraction | int) -> Node:
    """A literal."""
    return Node("number", Fraction(value))


def negated(node: Node) -> Node:
    """Minus a formula."""
    return Node("negate", "", (node,))


def letters(node: Node) -> set[str]:
    """The symbols of a formula."""
    own = {str(node.value)} if node.kind == "symbol" else set()
    return own.union(*(letters(argument) for argument in node.args))


def has_sign(node: Node) -> bool:
    """Whether a plus-minus occurs in a formula."""
    return node.kind == "sign" or any(has_sign(argument) for argument in node.args)


def signed(node: Node, sign: str) -> Node:
    """The formula with each plus-minus read as `+` or as `-`."""
    args = tuple(signed(argument, sign) for argument in node.args)
    if node.kind != "sign":
        return Node(node.kind, node.value, args)
    return args[0] if node.value == sign else negated(args[0])

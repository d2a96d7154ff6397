"""The tree of a formula."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Node", "letters", "mentions", "negated", "number", "signed", "subtrees"]


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


def subtrees(node: Node) -> Iterator[Node]:
    """A formula and all formulas in it."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        waiting.extend(part.args)


def letters(node: Node) -> set[str]:
    """The symbols of a formula."""
    return {str(part.value) for part in subtrees(node) if part.kind == "symbol"}


def mentions(node: Node, constant: str) -> bool:
    """Whether a constant such as i or infinity occurs in a formula."""
    return any(part.kind == "constant" and part.value == constant for part in subtrees(node))


def signed(node: Node, sign: str) -> Node:
    """The formula with each plus-minus read as `+` or as `-`."""
    args = tuple(signed(argument, sign) for argument in node.args)
    if node.kind != "sign":
        return Node(node.kind, node.value, args)
    return args[0] if node.value == sign else negated(args[0])

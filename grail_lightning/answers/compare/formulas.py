"""Small questions about one formula that decide how two are compared."""

from grail_lightning.answers.compare.exact import rational
from grail_lightning.answers.grammar.nodes import Node

__all__ = ["infinite", "same_form", "sign_of_infinity", "single"]


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

"""Are two formulas equal, with what surrounds them? Exact numbers first, then the slow layers."""

from fractions import Fraction

from grail_lightning.answers.compare import symbolic
from grail_lightning.answers.compare.conventions import LAYERS, Conventions
from grail_lightning.answers.compare.exact import is_terminating, rational
from grail_lightning.answers.compare.quantities import clash, cut_off, factors_between, slack_between, times
from grail_lightning.answers.compare.words import anagrams, wordy
from grail_lightning.answers.grammar.kinds import Leaf
from grail_lightning.answers.grammar.nodes import Node, mentions
from grail_lightning.answers.grammar.normalise import string_key
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Formulas", "Undecided", "Unparseable", "same_form"]


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
        """Note that a layer was needed."""
        self.layer = max(self.layer, LAYERS.index(layer))

    def reach_slow(self, layer: str) -> None:
        """Note that a slow layer was needed."""
        if not self.slow:
            raise Undecided
        self.reach(layer)

    def leaves(self, gold: Leaf, other: Leaf) -> bool:
        """Two formulas with what surrounds them."""
        left, right = gold.quantity, other.quantity
        if clash(left.unit, right.unit) or (not self.conventions.missing_unit and left.unit != right.unit):
            return False
        if string_key(left.text) == string_key(right.text) and left[2:] == right[2:]:
            return True
        if anagrams(left.text, right.text):
            return False
        if gold.node is None or other.node is None:
            return self.unknown(left, right, other.node is None)
        slack = slack_between(left, right, self.conventions.tolerance)
        if cut_off(right.text) and not cut_off(left.text):
            value = rational(gold.node)
            if not slack or (value is not None and is_terminating(value)):
                return False
        factors = factors_between(left, right, self.conventions)
        return any(self.nodes(times(gold.node, *ours), times(other.node, *theirs), slack) for ours, theirs in factors)

    def nodes(self, gold: Node, other: Node, slack: float = 0.0) -> bool:
        """Two formulas."""
        left, right = rational(gold), rational(other)
        if gold == other:  # two spellings of one formula
            self.reach("structure" if left is None else "number")
            return True
        if left is not None and right is not None:
            self.reach("number")
            if left == right or slack == 0 or (is_terminating(left) and is_terminating(right)):
                return left == right
            return abs(left - right) <= Fraction(str(slack)) * abs(left)
        if mentions(gold, "inf") or mentions(other, "inf"):
            return _sign_of_infinity(gold) == _sign_of_infinity(other) != 0
        if gold.kind == other.kind == "symbol":
            return False
        if (left is not None and _single(other)) or (right is not None and _single(gold)):
            return False
        self.reach_slow("symbolic")
        return symbolic.equal(gold, other, slack)

    def unknown(self, left: Quantity, right: Quantity, prediction_unknown: bool) -> bool:
        """A formula outside of the grammar."""
        if wordy(left.text) or wordy(right.text):
            if prediction_unknown:
                raise Unparseable
            return False
        self.reach_slow("math-verify")
        verdict = symbolic.external(left.text, right.text, self.conventions.tolerance)
        if verdict is None:
            raise Unparseable
        return verdict


def _single(node: Node) -> bool:
    """Whether a formula is one letter, possibly with a rational factor: never equal to a number."""
    return node.kind == "symbol" or (
        node.kind in ("negate", "multiply")
        and all(_single(argument) or argument.kind == "number" for argument in node.args)
        and sum(_single(argument) for argument in node.args) == 1
        and all(argument.value != 0 for argument in node.args if argument.kind == "number")
    )


def _sign_of_infinity(node: Node) -> int:
    """1 or -1 for a signed infinity, 0 for anything else."""
    if node == Node("constant", "inf"):
        return 1
    return -_sign_of_infinity(node.args[0]) if node.kind == "negate" else 0


def same_form(one: Node, two: Node) -> bool:
    """Whether two formulas without letters are the same tree, or two spellings of one number such as 1/2 and 0.5."""
    return one == two or (_spelled(one) and _spelled(two) and rational(one) == rational(two))


def _spelled(node: Node) -> bool:
    return node.kind == "number" or (node.kind in ("negate", "divide") and all(map(_spelled, node.args)))

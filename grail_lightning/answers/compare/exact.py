"""The value of a formula: one walk over its tree for all kinds of numbers, and exact rational numbers, with caps."""

import math
from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

from grail_lightning.answers.grammar.nodes import Node

__all__ = ["Evaluator", "TooLarge", "Undefined", "is_terminating", "rational"]

# 2^17 bits are 39,000 digits: more than any reference answer, and a power of that size takes microseconds.
_MAX_BITS = 1 << 17
_MAX_FACTORIAL = 2000
_ROOT_BITS = 4096


class TooLarge(ValueError):  # noqa: N818 (it is caught, not reported)
    """A number beyond the caps."""


class Undefined(ValueError):  # noqa: N818 (it is caught, not reported)
    """A value that does not exist, such as one over zero."""


class Evaluator(ABC):
    """Computes formulas in one kind of number.

    A formula has no value (None) if one of its parts has none in this kind of number, such as a letter.
    """

    def value(self, node: Node) -> Any:
        """The value of a formula, or None.

        Args:
            node: a formula.

        Raises:
            TooLarge: If a step passes the caps.
            Undefined: If a step has no value.
        """
        known = self.known(node)
        if known is not None or not node.args or node.kind == "sign":
            return known
        values: list[Any] = []
        for argument in node.args:
            values.append(self.value(argument))
            if values[-1] is None:
                return None
        return self.applied(node, values)

    def applied(self, node: Node, values: list[Any]) -> Any:
        """The value of an operation on numbers."""
        match node.kind:
            case "add":
                return sum(values[1:], values[0])
            case "multiply":
                return values[0] * values[1]
            case "negate":
                return -values[0]
            case "divide":
                if not values[1]:
                    raise Undefined("a division by zero")
                return values[0] / values[1]
            case "power":
                return self.power(values[0], values[1])
        return self.function(str(node.value), values)

    @abstractmethod
    def known(self, node: Node) -> Any:
        """The value of a number, a symbol or a constant, or of any formula of which it is known without a walk."""

    @abstractmethod
    def power(self, base: Any, exponent: Any) -> Any:
        """A power."""

    @abstractmethod
    def function(self, name: str, values: list[Any]) -> Any:
        """The value of a function, of which roots are one."""


def rational(node: Node) -> Fraction | None:
    """The value of a formula as a fraction, or None if it has none that this module finds (letters, roots, functions).

    Args:
        node: a formula.

    Raises:
        TooLarge: If a step passes the caps.
        Undefined: If a step has no value.
    """
    value: Fraction | None = _RATIONALS.value(node)
    return value


class _Rationals(Evaluator):
    """Exact numbers: what has letters, or is not rational, has no value."""

    def known(self, node: Node) -> Fraction | None:
        return node.value if isinstance(node.value, Fraction) else None

    def applied(self, node: Node, values: list[Any]) -> Fraction | None:
        value: Fraction | None = super().applied(node, values)
        if value is not None and value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
            raise TooLarge("a number of more than 39,000 digits")
        return value

    def power(self, base: Fraction, exponent: Fraction) -> Fraction | None:
        if exponent.denominator != 1:
            root = _root(base, Fraction(exponent.denominator))
            return None if root is None else self.power(root, Fraction(exponent.numerator))
        if not base and exponent <= 0:
            raise Undefined("zero to a power of zero or less")
        if abs(base) == 1:
            return base if exponent % 2 else Fraction(1)
        if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > _MAX_BITS:
            raise TooLarge("a power of more than 39,000 digits")
        return base**exponent.numerator

    def function(self, name: str, values: list[Fraction]) -> Fraction | None:
        match name:
            case "root":
                return _root(*values)
            case "abs":
                return abs(values[0])
            case "floor" | "ceil":
                return Fraction(getattr(math, name)(values[0]))
            case "factorial":
                return Fraction(math.factorial(_count(values[0])))
            case "binomial":
                return Fraction(math.comb(_count(values[0]), _count(values[1])))
        return None


_RATIONALS = _Rationals()


def _count(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise Undefined("a factorial of something other than a whole number")
    if value > _MAX_FACTORIAL:
        raise TooLarge(f"a factorial above {_MAX_FACTORIAL}")
    return value.numerator


def _root(value: Fraction, degree: Fraction) -> Fraction | None:
    """The real root if it is rational; the principal root of a negative number is, for an odd degree, the real one."""
    if degree.denominator != 1 or not 1 < degree <= 64 or (value < 0 and degree % 2 == 0):
        return None
    upper, lower = (_whole_root(whole, degree.numerator) for whole in (abs(value.numerator), value.denominator))
    return None if upper is None or lower is None else Fraction(upper, lower) * (-1 if value < 0 else 1)


def _whole_root(value: int, degree: int) -> int | None:
    if value.bit_length() > _ROOT_BITS:
        return None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def is_terminating(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion: twos and fives divide its denominator, and nothing else."""
    bits = value.denominator.bit_length()
    return bits <= 4096 and 10**bits % value.denominator == 0

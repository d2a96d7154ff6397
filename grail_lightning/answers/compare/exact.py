"""Formulas without letters: exact rational values, with caps on every operation that can explode."""

import math
from fractions import Fraction

from grail_lightning.answers.compare.evaluate import Evaluator, TooLarge, Undefined
from grail_lightning.answers.grammar.nodes import Node

__all__ = ["is_terminating", "rational"]

# 2^17 bits are 39,000 digits: more than any reference answer, and a power of that size takes microseconds.
_MAX_BITS = 1 << 17
_MAX_FACTORIAL = 2000
_ROOT_ROUNDS = 4096


def rational(node: Node) -> Fraction | None:
    """The value of a formula as a fraction, or None if it has none that this module finds (letters, roots, functions).

    Args:
        node: a formula.

    Raises:
        TooLarge: If a step passes the caps.
        Undefined: If a step has no value.
    """
    return _RATIONALS.value(node)


class _Rationals(Evaluator[Fraction]):
    """Exact numbers: what has letters, or is not rational, has no value."""

    def known(self, node: Node) -> Fraction | None:
        return node.value if isinstance(node.value, Fraction) else None

    def total(self, values: list[Fraction]) -> Fraction:
        return sum(values, Fraction(0))

    def power(self, base: Fraction, exponent: Fraction) -> Fraction | None:
        if exponent.denominator != 1:
            root = _root(base, Fraction(exponent.denominator))
            return None if root is None else self.power(root, Fraction(exponent.numerator))
        if not base and exponent <= 0:
            raise Undefined("zero to a power of zero or less")
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) != 1 and bits * abs(exponent) > _MAX_BITS:
            raise TooLarge("a power of more than 39,000 digits")
        if abs(base) == 1:
            return base if exponent % 2 else Fraction(1)
        return base**exponent.numerator

    def function(self, name: str, values: list[Fraction]) -> Fraction | None:
        first = values[0]
        if name == "root":
            return _root(*values)
        if name == "abs":
            return abs(first)
        if name in ("floor", "ceil"):
            return Fraction(math.floor(first) if name == "floor" else math.ceil(first))
        if name == "factorial":
            return Fraction(math.factorial(_count(first)))
        if name == "binomial":
            upper, lower = _count(first), _count(values[1])
            return Fraction(math.comb(upper, lower))
        return None

    def checked(self, value: Fraction | None) -> Fraction | None:
        if value is not None and value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
            raise TooLarge("a number of more than 39,000 digits")
        return value


_RATIONALS = _Rationals()


def _count(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise Undefined("a factorial of something other than a whole number")
    if value > _MAX_FACTORIAL:
        raise TooLarge(f"a factorial above {_MAX_FACTORIAL}")
    return value.numerator


def _root(value: Fraction, degree: Fraction) -> Fraction | None:
    """The real root if it is rational."""
    if degree.denominator != 1 or not 1 < degree <= 64:
        return None
    n = degree.numerator
    if value < 0:
        # The principal root of a negative number is complex; an odd root of it is meant as the real one.
        positive = _root(-value, degree) if n % 2 else None
        return None if positive is None else -positive
    upper, lower = _whole_root(value.numerator, n), _whole_root(value.denominator, n)
    return Fraction(upper, lower) if upper is not None and lower is not None else None


def _whole_root(value: int, degree: int) -> int | None:
    if value.bit_length() > _ROOT_ROUNDS:
        return None
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low if low**degree == value else None


def is_terminating(value: Fraction) -> bool:
    """Whether a fraction has a finite decimal expansion."""
    rest = value.denominator
    if rest.bit_length() > 4096:
        return False
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1

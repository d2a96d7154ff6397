"""Formulas without letters: exact rational values, with caps on every operation that can explode."""

import cmath
import math
from fractions import Fraction

from grail_lightning.answers.grammar.nodes import Node

__all__ = ["TooLarge", "Undefined", "approximate", "is_terminating", "rational"]

# 2^17 bits are 39,000 digits: more than any reference answer, and a power of that size takes microseconds.
_MAX_BITS = 1 << 17
_MAX_FACTORIAL = 2000
_ROOT_ROUNDS = 4096


class TooLarge(ValueError):  # noqa: N818 (it is caught, not reported)
    """A number beyond the caps."""


class Undefined(ValueError):  # noqa: N818 (it is caught, not reported)
    """A value that does not exist, such as one over zero."""


def rational(node: Node) -> Fraction | None:
    """The value of a formula as a fraction, or None if it has none that this module finds (letters, roots, functions).

    Args:
        node: a formula.

    Raises:
        TooLarge: If a step passes the caps.
        Undefined: If a step has no value.
    """
    if node.kind == "number":
        assert isinstance(node.value, Fraction)
        return node.value
    if node.kind in ("symbol", "constant", "sign"):
        return None
    values = []
    for argument in node.args:
        value = rational(argument)
        if value is None:
            return None
        values.append(value)
    return _within(_apply(node, values))


def _apply(node: Node, values: list[Fraction]) -> Fraction | None:
    if node.kind == "add":
        return sum(values, Fraction(0))
    if node.kind == "multiply":
        return values[0] * values[1]
    if node.kind == "negate":
        return -values[0]
    if node.kind == "divide":
        if not values[1]:
            raise Undefined("a division by zero")
        return values[0] / values[1]
    if node.kind == "power":
        return _power(*values)
    return _function(str(node.value), values)


def _within(value: Fraction | None) -> Fraction | None:
    if value is not None and value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
        raise TooLarge("a number of more than 39,000 digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, Fraction(exponent.denominator))
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if not base and exponent <= 0:
        raise Undefined("zero to a power of zero or less")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > _MAX_BITS:
        raise TooLarge("a power of more than 39,000 digits")
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return base**exponent.numerator


def _function(name: str, values: list[Fraction]) -> Fraction | None:
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


def approximate(node: Node) -> float | None:
    """A float near a real formula without letters, for ordering the ends of intervals; None if there is none."""
    try:
        value = _floating(node)
        return value.real if abs(value.imag) <= 1e-9 * (1 + abs(value)) else None
    except (ArithmeticError, ValueError, KeyError):
        return None


_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "inf": complex(math.inf)}


def _floating(node: Node) -> complex:
    exact = rational(node)
    if exact is not None:
        return complex(float(exact))
    if node.kind == "constant":
        return _CONSTANTS[str(node.value)]
    values = [_floating(argument) for argument in node.args]
    first = values[0] if values else 0j
    if node.kind == "add":
        return complex(math.fsum(value.real for value in values), math.fsum(value.imag for value in values))
    if node.kind == "negate":
        return complex(-first.real, -first.imag)
    if node.kind == "multiply":
        return first * values[1]
    if node.kind == "divide":
        return first / values[1]
    if node.kind == "power":
        return first ** values[1]
    name = str(node.value)
    if name == "root":
        return first ** (1 / values[1])
    if name in ("ln", "log"):
        return cmath.log(first)
    if name == "degrees":
        return first * math.pi / 180
    return (
        complex(getattr(cmath, {"arctan": "atan", "arcsin": "asin", "arccos": "acos"}.get(name, name))(first))
        if (name in ("sin", "cos", "tan", "exp", "sinh", "cosh", "tanh", "arctan", "arcsin", "arccos"))
        else _FUNCTIONS[name](first)
    )


_FUNCTIONS = {"abs": lambda value: complex(abs(value)), "sec": lambda value: 1 / cmath.cos(value)}

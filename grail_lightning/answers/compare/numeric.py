"""Formulas as numbers of many digits (mpmath's, for a worker) or as floats (for any thread), with caps."""

import cmath
import math
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

from grail_lightning.answers.compare.exact import Evaluator, TooLarge, Undefined, rational
from grail_lightning.answers.grammar.functions import HYPERBOLIC, INVERSE, LOGARITHMS, TRIGONOMETRIC
from grail_lightning.answers.grammar.nodes import Node, letters

__all__ = ["MAX_LOG2", "approximate", "contexts", "is_imaginary", "power_too_large", "value_at"]

_DIGITS = (60, 120)
# Magnitudes beyond 2^(10^6) are towers of powers; no reference answer is near.
MAX_LOG2 = 10**6
_MAX_FACTORIAL = 10**6
# Our names of functions, and mpmath's.
_FUNCTIONS = {
    **{name: name for name in (*TRIGONOMETRIC, *HYPERBOLIC, "coth", "exp", "factorial", "binomial", "floor", "ceil")},
    **{inverse: f"a{name}" for name, inverse in INVERSE.items()},
    **dict.fromkeys(LOGARITHMS, "log"),
    "abs": "fabs",
    "degrees": "radians",
}
# What floats have of a context of mpmath's, whose functions change its precision while they run: not for threads.
_FLOATS = SimpleNamespace(
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", *HYPERBOLIC)},
    **{"pi": math.pi, "e": math.e, "inf": math.inf, "mpf": complex, "mpc": complex, "fabs": abs},
    re=lambda value: value.real,
    sec=lambda angle: 1 / cmath.cos(angle),
    radians=lambda angle: angle * math.pi / 180,
)


@cache
def contexts() -> tuple[Any, ...]:
    """Two of mpmath's contexts, with 60 and with 120 digits."""
    import mpmath

    made = tuple(mpmath.MPContext() for _ in _DIGITS)
    for context, digits in zip(made, _DIGITS, strict=True):
        context.dps = digits
    return made


def value_at(node: Node, point: dict[str, Fraction], context: Any) -> Any:
    """The value of a formula, None if there is no finite one.

    Args:
        node: a formula.
        point: a number for each letter.
        context: one of `contexts()`.

    Raises:
        TooLarge: If a step passes the caps.
    """
    try:
        value = _AtPoint(point, context).value(node)
    except (ZeroDivisionError, Undefined, OverflowError):
        return None
    return value if value is not None and context.isfinite(value) else None


def approximate(node: Node) -> float | None:
    """A float near a real formula without letters, for ordering the ends of intervals; None if there is none."""
    try:
        exact = rational(node)
        value = complex(float(exact)) if exact is not None else _AtPoint({}, _FLOATS).value(node)
    except (ArithmeticError, AttributeError, ValueError):  # AttributeError: a function that floats do not have
        return None
    return float(value.real) if value is not None and abs(value.imag) <= 1e-9 * (1 + abs(value)) else None


def is_imaginary(value: Any) -> bool:
    """Whether a number is more than a real one and rounding."""
    return bool(abs(value.imag) > abs(value) * 1e-30)


def power_too_large(base: Any, exponent: Any, context: Any) -> bool:
    """Whether a power of a number other than zero is beyond the caps."""
    return bool(abs(exponent) * (abs(context.log(abs(base), 2)) + 5) > MAX_LOG2)


class _AtPoint(Evaluator):
    """Numbers of many digits (mpmath), with a rational number for each letter."""

    def __init__(self, point: dict[str, Fraction], context: Any) -> None:
        self.point = point
        self.context = context

    def known(self, node: Node) -> Any:
        context = self.context
        if node.kind == "constant":
            return {"pi": context.pi, "e": context.e, "i": context.mpc(0, 1), "inf": context.inf}[str(node.value)] * 1
        exact = self.point.get(str(node.value)) if node.kind == "symbol" else None if letters(node) else _exact(node)
        return None if exact is None else context.mpf(exact.numerator) / exact.denominator

    def power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            if self.context.re(exponent) <= 0:
                raise Undefined("zero to a power of zero or less")
            return base
        if power_too_large(base, exponent, self.context):
            raise TooLarge("a power beyond the caps")
        return base**exponent

    def function(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if name == "root":
            return self.root(*values)
        if name in ("factorial", "binomial") and max(abs(value) for value in values) > _MAX_FACTORIAL:
            raise TooLarge("a factorial beyond the caps")
        if name in ("exp", *HYPERBOLIC, *TRIGONOMETRIC) and abs(first) > MAX_LOG2:
            raise TooLarge("an exponential beyond the caps")
        if name not in _FUNCTIONS or (name in LOGARITHMS and first == 0):
            raise Undefined(f"{name} there")
        return getattr(self.context, _FUNCTIONS[name])(*values)

    def root(self, value: Any, degree: Any) -> Any:
        if degree == 0:
            raise Undefined("a root of degree zero")
        if not is_imaginary(value) and value.real < 0 and degree == int(degree.real) % 2 * degree:
            return -((-value) ** (1 / degree))  # an odd root of a negative number is meant as the real one
        return self.power(value, 1 / degree) if value else value


def _exact(node: Node) -> Fraction | None:
    try:
        return rational(node)
    except TooLarge:
        return None

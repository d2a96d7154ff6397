r"""The value of a formula: exact rational numbers, numbers of many digits at random points, floats; all with caps.

Two formulas are equal if they agree at points drawn once and for all. At each point both are computed with 60 and
with 120 digits: a difference that shrinks with the precision is rounding, one that stays is real. So
:math:`\sqrt{6+2\sqrt5} = 1+\sqrt5` is accepted and :math:`\sqrt2 = \sqrt2 + 10^{-40}` is not. There is no
simplification that could run away; the cost is that of a few evaluations.
"""

import math
import random
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Any

from grail_lightning.answers.normalise import HYPERBOLIC, INVERSE, LOGARITHMS, TRIGONOMETRIC
from grail_lightning.answers.parse import Node, letters, mentions, subtrees

# 2^17 bits are 39,000 digits: more than any reference answer, and a power of that size takes microseconds.
_MAX_BITS = 1 << 17
_MAX_FACTORIAL = 5000


class TooLarge(ValueError):  # noqa: N818 (it is caught, not reported)
    """A number beyond the caps."""


class Undefined(ValueError):  # noqa: N818 (it is caught, not reported)
    """A value that does not exist, such as one over zero."""


class _Evaluator:
    """Computes formulas in one kind of number: `_Rationals` or `_AtPoint`.

    A formula has no value (None) if one of its parts has none in this kind of number, such as a letter. `known` is the
    value of a number, a symbol or a constant, or of any formula of which it is known without a walk.
    """

    known: Any
    power: Any
    function: Any

    def value(self, node: Node) -> Any:
        result = self.known(node)
        if result is not None or not node.args or node.kind == "sign":
            return result
        values: list[Any] = []
        for argument in node.args:
            values.append(self.value(argument))
            if values[-1] is None:
                return None
        return self.applied(node, values)

    def applied(self, node: Node, values: list[Any]) -> Any:
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


def rational(node: Node) -> Fraction | None:
    """The value of a formula as a fraction; None if no rational one is found (letters, roots, functions)."""
    value: Fraction | None = _RATIONALS.value(node)
    return value


class _Rationals(_Evaluator):
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
            return None
        if not base and exponent <= 0:
            raise Undefined("zero to a power of zero or less")
        if abs(base) == 1:
            return base if exponent % 2 else Fraction(1)
        if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > _MAX_BITS:
            raise TooLarge("a power of more than 39,000 digits")
        return base**exponent.numerator

    def function(self, name: str, values: list[Fraction]) -> Fraction | None:
        match name:
            case "root" if values[1] == 2 and values[0] >= 0:
                root = Fraction(math.isqrt(values[0].numerator), math.isqrt(values[0].denominator))
                return root if root * root == values[0] else None
            case "abs":
                return abs(values[0])
            case "max" | "min":
                return (max if name == "max" else min)(values)
            case "mod" | "gcd" | "lcm":
                if any(value.denominator != 1 for value in values) or (name == "mod" and values[1] <= 0):
                    raise Undefined(f"{name} of something other than whole numbers")
                return values[0] % values[1] if name == "mod" else Fraction(getattr(math, name)(*map(int, values)))
            case "factorial" | "double factorial" | "binomial":
                if any(value.denominator != 1 or value < 0 for value in values):
                    raise Undefined("a factorial of something other than a whole number")
                if max(values) > _MAX_FACTORIAL:
                    raise TooLarge(f"a factorial above {_MAX_FACTORIAL}")
                if name == "double factorial":
                    return Fraction(math.prod(range(int(values[0]), 0, -2)))
                return Fraction((math.factorial if name == "factorial" else math.comb)(*map(int, values)))
        return None


_RATIONALS = _Rationals()


_DIGITS = (60, 120)
# Magnitudes beyond 2^(10^6) are towers of powers; no reference answer is near.
_MAX_LOG2 = 10**6
_MAX_FACTORIAL_AT_POINT = 10**6
# Of other numbers than whole ones these take seconds with thousands of digits.
_SLOW = {"factorial", "double factorial", "binomial"}
_PARTS = {"conjugate": "conj", "Re": "re", "Im": "im"}
# 120 digits tell numbers of 20 apart, and roots of them; beyond that as many are computed as are needed.
_MOST_DIGITS_BEFORE, _MOST_DIGITS, _PLACES = 20, 3000, 40
# Our names of functions, and mpmath's.
_FUNCTIONS = {
    **{name: name for name in (*TRIGONOMETRIC, *HYPERBOLIC, "exp", "factorial", "binomial")},
    **{inverse: f"a{name}" for name, inverse in INVERSE.items()},
    **dict.fromkeys(LOGARITHMS, "log"),
    "double factorial": "fac2",
    "abs": "fabs",
}


@cache
def _contexts() -> tuple[Any, ...]:
    import mpmath

    contexts = tuple(mpmath.MPContext() for _ in _DIGITS)
    for context, digits in zip(contexts, _DIGITS, strict=True):
        context.dps = digits
    return contexts


def prepare() -> None:
    """Make what takes a while to make, so that no pair pays for it."""
    _contexts()


def _value_at(node: Node, point: dict[str, Fraction], context: Any) -> Any:
    """The value of a formula, None if there is no finite one."""
    try:
        value = _AtPoint(point, context).value(node)
    except (ZeroDivisionError, Undefined, OverflowError):
        return None
    return value if value is not None and context.isfinite(value) else None


def approximate(node: Node) -> float | None:
    """A float near a real formula without letters, for ordering the ends of intervals; None if there is none."""
    import mpmath

    try:
        exact = rational(node)
        value = complex(exact if exact is not None else _AtPoint({}, mpmath.fp).value(node))
    except (ArithmeticError, TypeError, ValueError):  # TypeError: a formula with letters has no value
        return None
    return value.real if abs(value.imag) <= 1e-9 * (1 + abs(value)) else None


def _is_imaginary(value: Any) -> bool:
    """Whether a number is more than a real one and rounding."""
    return bool(abs(value.imag) > abs(value) * 1e-30)


class _AtPoint(_Evaluator):
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
        if abs(exponent) * (abs(self.context.log(abs(base), 2)) + 5) > _MAX_LOG2:
            raise TooLarge("a power beyond the caps")
        return base**exponent

    def function(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if name == "root":
            return self.root(*values)
        if name == "degrees":
            return first * self.context.pi / 180
        if name in _PARTS:
            return getattr(self.context, _PARTS[name])(first)
        if name in ("max", "min"):
            if any(map(_is_imaginary, map(self.context.mpc, values))):
                raise Undefined(f"{name} of complex numbers")
            return (max if name == "max" else min)(values, key=self.context.re)
        if name.endswith(("factorial", "binomial")) and max(abs(value) for value in values) > _MAX_FACTORIAL_AT_POINT:
            raise TooLarge("a factorial beyond the caps")
        if name in ("exp", *HYPERBOLIC, *TRIGONOMETRIC) and abs(first) > _MAX_LOG2:
            raise TooLarge("an exponential beyond the caps")
        if name not in _FUNCTIONS or (name in LOGARITHMS and first == 0):
            raise Undefined(f"{name} there")
        return getattr(self.context, _FUNCTIONS[name])(*values)

    def root(self, value: Any, degree: Any) -> Any:
        if not _is_imaginary(value) and value.real < 0 and degree == int(degree.real) % 2 * degree:
            return -((-value) ** (1 / degree))  # an odd root of a negative number is meant as the real one
        return self.power(value, 1 / degree) if value else value


def _exact(node: Node) -> Fraction | None:
    try:
        return rational(node)
    except TooLarge:
        return None


def agree_everywhere(left: Node, right: Node, tolerance: float) -> bool:
    """Whether two formulas agree wherever both are defined."""
    names = sorted(letters(left) | letters(right))
    keep_complex = mentions(left, "i") or mentions(right, "i")
    compared = 0
    for positive, point in _points(names):
        agree = _agree(left, right, point, 0.0 if names else tolerance, keep_complex or positive)
        # A number of many digits beside a letter shows at one point as at all others.
        if agree is False or (agree and names and not compared and not _equal_with_digits(left, right, point)):
            return False
        compared += bool(agree)
    return compared >= (2 if names else 1)


def ratio_sign(left: Node, right: Node) -> int:
    """The sign of left/right if it is the same real number at all points and both have the same letters, else 0."""
    names = letters(left)
    if not names or names != letters(right):
        return 0
    points = _points(sorted(names))
    context, places = _finer(left, right, points[0][1])
    values = [[_value_at(node, point, context) for node in (left, right)] for _, point in points]
    values = [pair for pair in values if None not in pair]
    if len(values) < 3 or any(min(map(abs, pair)) < 1e-30 for pair in values):
        return 0
    first, *others = [context.mpc(numerator / denominator) for numerator, denominator in values]
    slack = abs(first) * context.mpf(10) ** -places
    constant = abs(first.imag) <= slack and all(abs(ratio - first) <= slack for ratio in others)
    return (1 if first.real > 0 else -1) if constant else 0


def _points(names: list[str]) -> list[tuple[bool, dict[str, Fraction]]]:
    """Five points with positive coordinates, then five of any sign; one empty point if there are no names."""
    draw = random.Random(20_260_101)  # noqa: S311 (no secret: the same points for all, so that a verdict is repeatable)
    points = []
    for positive in [True] * 5 + [False] * 5 if names else [True]:
        sizes = [Fraction(draw.randrange(10_000, 40_000), draw.randrange(10_007, 20_011)) for _ in names]
        signs = [1 if positive else draw.choice((1, -1)) for _ in names]
        points.append((positive, {name: sign * size for name, sign, size in zip(names, signs, sizes, strict=True)}))
    return points


def _agree(left: Node, right: Node, point: dict[str, Fraction], tolerance: float, keep_complex: bool) -> bool | None:
    """Whether two formulas are equal at a point; None where one of them is undefined (or not real, if that counts)."""
    differences: list[Any] = []
    size: Any = 0
    for context in _contexts():
        z, w = _value_at(left, point, context), _value_at(right, point, context)
        if z is None or w is None or (not keep_complex and (_is_imaginary(z) or _is_imaginary(w))):
            return None
        size = max(abs(z), abs(w))
        differences.append(abs(z - w))
        if tolerance and differences[-1] <= tolerance * abs(z):
            return True
        if differences[-1] > size * 1e-15 and size > 1e-30:
            return False
    coarse, fine = differences
    equal = bool(fine <= size * 1e-100 or fine <= coarse * 1e-45 or (not coarse and fine <= 1e-100))
    return equal and (bool(point) or _equal_with_digits(left, right, point))


class _Measured(_AtPoint):
    """Notes how many digits the numbers on the way to a value have, before the point or of zeros behind it."""

    digits = 0.0

    def value(self, node: Node) -> Any:
        value = super().value(node)
        if value is not None and value and self.context.isfinite(value):
            exact = _exact(node)
            bits = [float(self.context.mag(value))]  # What is small may be rounding: the sine of pi.
            bits += [] if exact is None else [exact.numerator.bit_length(), exact.denominator.bit_length()]
            self.digits = max(self.digits, max(bits) / 3)
        return value


def _finer(left: Node, right: Node, point: dict[str, Fraction]) -> tuple[Any, int]:
    """Numbers of four times as many digits as those on the way to two values have, and how many digits must agree."""
    import mpmath

    measured = _Measured(point, _contexts()[0])
    for node in (left, right):
        with suppress(ZeroDivisionError, Undefined, OverflowError):
            measured.value(node)
    parts = [part for node in (left, right) for part in subtrees(node) if part.value in _SLOW]
    slow = measured.digits > _MOST_DIGITS_BEFORE and any(_exact(part) is None for part in parts)
    if measured.digits <= _MOST_DIGITS_BEFORE or (slow and point):
        return _contexts()[0], _PLACES
    if (slow or measured.digits > _MOST_DIGITS) and not point:
        raise TooLarge("numbers of too many digits to be told apart")
    digits = min(int(measured.digits) + 1, _MOST_DIGITS)
    context = mpmath.MPContext()
    context.dps = 120 + 4 * digits
    return context, 100 + 3 * digits


def _equal_with_digits(left: Node, right: Node, point: dict[str, Fraction]) -> bool:
    """Whether two formulas that seem equal at a point still are with as many digits as their numbers ask for."""
    context, places = _finer(left, right, point)
    if places == _PLACES:
        return True
    z, w = (_value_at(node, point, context) for node in (left, right))
    return bool(abs(z - w) <= max(1, abs(z)) * context.mpf(10) ** -places)

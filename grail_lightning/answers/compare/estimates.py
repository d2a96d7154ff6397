"""Numbers for sums, products and integrals, before a library that seeks closed forms sees them.

Such a library may seek for ever. Most wrong answers are told by a few hundred evaluations: a different number is a
different answer. Expressions are SymPy trees, walked here and never printed, so no text of a model becomes code.
"""

import zlib
from typing import Any

from grail_lightning.answers.compare.evaluate import TooLarge, Undefined
from grail_lightning.answers.grammar.functions import HYPERBOLIC, TRIGONOMETRIC

__all__ = ["differ", "same_but_for_names"]

_DIGITS = 25
_CLOSE = 1e-6
_SMALLEST = 1e-9
_MOST_TERMS = 10_000
_MOST_SERIES_TERMS = 400
_VANISHED_TERMS = 8
_QUADRATURE_DEGREE = 7
_MAX_LOG2 = 10**6
_RANGED = ("Integral", "Sum", "Product")
_FUNCTIONS = {"Abs": "fabs"} | {
    name: name for name in (*TRIGONOMETRIC, *HYPERBOLIC, "exp", "log", "asin", "acos", "atan", "factorial")
}


def same_but_for_names(one: Any, two: Any) -> bool:
    """Whether two expressions differ in the names of their bound variables alone: a sum over n and one over k.

    Args:
        one: an expression.
        two: another one.
    """
    import sympy

    if not isinstance(one, sympy.Expr) or not isinstance(two, sympy.Expr):
        return False
    return bool(one.as_dummy() == two.as_dummy())


def differ(one: Any, two: Any) -> bool:
    """Whether two expressions, at least one with a sum, product or integral, surely have different values.

    Letters stand for small numbers, the same on both sides: power series converge there.

    Args:
        one: an expression.
        two: another one.

    Raises:
        TooLarge: If a sum or product has too many terms to be looked at by anyone.
    """
    import sympy

    ranged = (sympy.Integral, sympy.Sum, sympy.Product)
    if not all(isinstance(expression, sympy.Expr) for expression in (one, two)) or not (
        one.has(*ranged) or two.has(*ranged)
    ):
        return False
    import mpmath

    context = mpmath.MPContext()
    context.dps = _DIGITS
    values = [_estimate(expression, context) for expression in (one, two)]
    if values[0] is None or values[1] is None:
        return False
    size = max(abs(values[0]), abs(values[1]), _SMALLEST)  # rounding around zero tells nothing
    return bool(abs(values[0] - values[1]) > _CLOSE * size)


def _estimate(expression: Any, context: Any) -> Any:
    point = {s: context.mpf(1000 + 3 * (zlib.crc32(s.name.encode()) % 1000)) / 10_000 for s in expression.free_symbols}
    try:
        value = _value(expression, point, context)
    except (ArithmeticError, Undefined, context.NoConvergence, ValueError) as error:
        if isinstance(error, TooLarge):
            raise
        return None
    return value if context.isfinite(value) else None


def _value(expression: Any, point: dict[Any, Any], context: Any) -> Any:
    """The value of an expression where its symbols have the values of `point`."""
    if expression in point:
        return point[expression]
    if expression.is_Number or expression.is_NumberSymbol:
        return context.mpf(str(expression.n(_DIGITS + 5)))
    if type(expression).__name__ in _RANGED:
        return _ranged(expression, point, context)
    values = [_value(argument, point, context) for argument in expression.args]
    if expression.is_Add:
        return sum(values, context.mpf(0))
    if expression.is_Mul:
        return context.fprod(values)
    if expression.is_Pow:
        return _power(values[0], values[1], context)
    name = _FUNCTIONS.get(type(expression).__name__)
    if name is None or len(values) != 1:
        raise Undefined(type(expression).__name__)
    if abs(values[0]) > _MAX_LOG2:
        raise Undefined("a number beyond the caps")
    return getattr(context, name)(values[0])


def _power(base: Any, exponent: Any, context: Any) -> Any:
    if base and abs(exponent) * (abs(context.log(abs(base), 2)) + 5) > _MAX_LOG2:
        raise Undefined("a power beyond the caps")
    return base**exponent


def _ranged(expression: Any, point: dict[Any, Any], context: Any) -> Any:
    """A sum, a product or an integral over one symbol."""
    if len(expression.limits) != 1 or len(expression.limits[0]) != 3:
        raise Undefined("several ranges")
    symbol, *ends = expression.limits[0]
    if type(expression).__name__ == "Integral":
        return _integral(expression.function, symbol, [_end(end, point, context) for end in ends], point, context)
    low, high = (_end(end, point, context) for end in ends)
    if high == context.inf and context.isint(low) and type(expression).__name__ == "Sum":
        return _series(expression.function, symbol, int(low), point, context)
    if not (context.isint(low) and context.isint(high)):
        raise Undefined("a range that is not of whole numbers")
    if high - low > _MOST_TERMS:
        raise TooLarge("a sum of very many terms")
    terms = [
        _value(expression.function, point | {symbol: context.mpf(n)}, context) for n in range(int(low), int(high) + 1)
    ]
    return sum(terms, context.mpf(0)) if type(expression).__name__ == "Sum" else context.fprod(terms)


def _series(function: Any, symbol: Any, low: int, point: dict[Any, Any], context: Any) -> Any:
    """An endless sum whose terms vanish quickly."""
    total, small = context.mpf(0), 0
    for n in range(low, low + _MOST_SERIES_TERMS):
        term = _value(function, point | {symbol: context.mpf(n)}, context)
        total += term
        small = small + 1 if abs(term) <= context.eps * max(abs(total), _SMALLEST) else 0
        if small == _VANISHED_TERMS:
            return total
    raise Undefined("a series that converges slowly")


def _end(end: Any, point: dict[Any, Any], context: Any) -> Any:
    if end.is_infinite:
        return context.inf if end.is_extended_positive else -context.inf
    return _value(end, point, context)


def _integral(function: Any, symbol: Any, ends: list[Any], point: dict[Any, Any], context: Any) -> Any:
    def at(place: Any) -> Any:
        try:
            return _value(function, point | {symbol: place}, context)
        except Undefined:  # underflow far out, mostly
            return context.mpf(0)

    if any(_has_range(argument) for argument in function.args):
        raise Undefined("an integral in an integral")
    value, error = context.quad(at, ends, error=True, maxdegree=_QUADRATURE_DEGREE)
    if error > _CLOSE * max(abs(value), _SMALLEST) / 1000:
        raise Undefined("an integral that does not settle")
    return value


def _has_range(expression: Any) -> bool:
    return type(expression).__name__ in _RANGED or any(map(_has_range, expression.args))

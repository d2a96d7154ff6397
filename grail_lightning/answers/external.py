"""math-verify, for what our grammar leaves out, and numbers for sums, products and integrals before it sees them.

A library that seeks closed forms may seek for ever. Most wrong answers are told by a few hundred evaluations: a
different number is a different answer. Expressions are SymPy trees, walked here and never printed, so no text of a
model becomes code. Importing this module takes a while: `worker.load` does it.
"""

import re
import zlib
from collections.abc import Callable
from typing import Any

import mpmath
import sympy
from math_verify import verify
from math_verify.parser import LatexExtractionConfig, normalize_latex, parse_latex_cached

from grail_lightning.answers.spellings import COMMON, HYPERBOLIC, TRIGONOMETRIC
from grail_lightning.answers.values import MAX_LOG2, TooLarge, Undefined, power_too_large

__all__ = ["equal"]


_EXTERNAL_CHARACTERS = 400
_OTHER_COMMANDS = (
    "frac sqrt pi infty int sum prod lim "
    "to binom lfloor rfloor lceil rceil max min gcd lcm det bmod mod pmod begin end left right cdot circ "
    "overline partial nabla alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma "
    "tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega vec hat bar mathbb in cup cap setminus "
    "emptyset { } |"
)
_KNOWN_COMMANDS = COMMON | frozenset(_OTHER_COMMANDS.split())
_DIGITS = 25
_CLOSE = 1e-6
_SMALLEST = 1e-9
_MOST_TERMS = 10_000
_MOST_SERIES_TERMS = 400
_VANISHED_TERMS = 8
_QUADRATURE_DEGREE = 7
_RANGED = (sympy.Integral, sympy.Sum, sympy.Product)
_FUNCTIONS = {"Abs": "fabs"} | {
    name: name for name in (*TRIGONOMETRIC, *HYPERBOLIC, "exp", "log", "asin", "acos", "atan", "factorial")
}
_context: Any = mpmath.MPContext()
_context.dps = _DIGITS


def equal(gold: str, prediction: str, tolerance: float) -> bool | None:
    """math-verify's verdict on two formulas, with its false acceptances closed; None if it cannot read one."""
    one, two = _sympy_of(gold), _sympy_of(prediction)
    if one is None or two is None:
        return None
    plain = _equal_at_a_glance(one, two)
    if plain is not None:
        return plain
    try:
        accepted = verify(one, two, timeout_seconds=None, allow_set_relation_comp=True)
    except Exception:  # a fault of the library's, on a formula that only it can read
        return None
    return bool(accepted) and _relatively_close(one, two, tolerance)


def _sympy_of(text: str) -> Any:
    """A formula as SymPy sees it through latex2sympy2-extended, or None."""
    commands = re.findall(r"\\([a-zA-Z]+|.)", text)
    if len(text) > _EXTERNAL_CHARACTERS or not set(commands) <= _KNOWN_COMMANDS:
        return None
    if re.search(r"[!?@#\"`;]|\^\{[^{}]*\^\{[^{}]*\^|[0-9]{40}", text) or text.count("=") > text.count("_{"):
        return None
    try:
        return parse_latex_cached(normalize_latex(text, LatexExtractionConfig().normalization_config))
    except Exception:  # the parser raises whatever its grammar meets
        return None


def _relatively_close(gold: Any, prediction: Any, tolerance: float) -> bool:
    """math-verify rounds to six places, so that all small numbers are equal to it: look again, relatively."""
    if getattr(gold, "free_symbols", True) or getattr(prediction, "free_symbols", True):
        return True
    try:
        one, two = complex(gold.evalf(30)), complex(prediction.evalf(30))
    except (TypeError, ValueError, AttributeError):
        return True
    return bool(abs(one - two) <= (tolerance * abs(one) if one else 1e-25))  # 30 digits of zero are rarely zero


def _equal_at_a_glance(one: Any, two: Any) -> bool | None:
    """Whether two expressions are equal where that is plain, else None.

    They are if they differ in the names of bound variables alone (a sum over n and one over k), and are not if there is
    a sum, a product or an integral and their numbers differ. Letters stand for small numbers, the same on both sides:
    power series converge there.
    """
    if not isinstance(one, sympy.Expr) or not isinstance(two, sympy.Expr):
        return None
    if one.as_dummy() == two.as_dummy():
        return True
    if not (one.has(*_RANGED) or two.has(*_RANGED)):
        return None
    left, right = _estimate(one), _estimate(two)
    if left is None or right is None:
        return None
    size = max(abs(left), abs(right), _SMALLEST)  # rounding around zero tells nothing
    return False if abs(left - right) > _CLOSE * size else None


def _estimate(expression: Any) -> Any:
    point = {s: _context.mpf(1000 + 3 * (zlib.crc32(s.name.encode()) % 1000)) / 10_000 for s in expression.free_symbols}
    try:
        value = _value(expression, point)
    except TooLarge:
        raise
    except (ArithmeticError, _context.NoConvergence, ValueError):
        return None
    return value if _context.isfinite(value) else None


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    """The value of an expression where its symbols have the values of `point`."""
    if expression in point:
        return point[expression]
    if expression.is_Number or expression.is_NumberSymbol:
        return _context.mpf(str(expression.n(_DIGITS + 5)))
    if isinstance(expression, _RANGED):
        return _ranged(expression, point)
    values = [_value(argument, point) for argument in expression.args]
    if expression.is_Add:
        return sum(values, _context.mpf(0))
    if expression.is_Mul:
        return _context.fprod(values)
    if expression.is_Pow:
        if values[0] and power_too_large(values[0], values[1], _context):
            raise Undefined("a power beyond the caps")
        return values[0] ** values[1]
    name = _FUNCTIONS.get(type(expression).__name__)
    if name is None or len(values) != 1:
        raise Undefined(type(expression).__name__)
    if abs(values[0]) > MAX_LOG2:
        raise Undefined("a number beyond the caps")
    return getattr(_context, name)(values[0])


def _ranged(expression: Any, point: dict[Any, Any]) -> Any:
    """A sum, a product or an integral over one symbol."""
    if len(expression.limits) != 1 or len(expression.limits[0]) != 3:
        raise Undefined("several ranges")
    symbol, *ends = expression.limits[0]

    def at(place: Any) -> Any:
        return _value(expression.function, point | {symbol: _context.mpf(place)})

    infinity = {sympy.oo: _context.inf, -sympy.oo: -_context.inf}
    low, high = (infinity[end] if end in infinity else _value(end, point) for end in ends)
    if isinstance(expression, sympy.Integral):
        if any(argument.has(*_RANGED) for argument in expression.function.args):
            raise Undefined("an integral in an integral")
        return _integral(at, low, high)
    add = isinstance(expression, sympy.Sum)
    if high == _context.inf and _context.isint(low) and add:
        return _series(at, int(low))
    if not (_context.isint(low) and _context.isint(high)):
        raise Undefined("a range that is not of whole numbers")
    if high - low > _MOST_TERMS:
        raise TooLarge("a sum of very many terms")
    terms = map(at, range(int(low), int(high) + 1))
    return sum(terms, _context.mpf(0)) if add else _context.fprod(terms)


def _series(at: Callable[[Any], Any], low: int) -> Any:
    """An endless sum whose terms vanish quickly."""
    total, small = _context.mpf(0), 0
    for n in range(low, low + _MOST_SERIES_TERMS):
        term = at(n)
        total += term
        small = small + 1 if abs(term) <= _context.eps * max(abs(total), _SMALLEST) else 0
        if small == _VANISHED_TERMS:
            return total
    raise Undefined("a series that converges slowly")


def _integral(at: Callable[[Any], Any], low: Any, high: Any) -> Any:
    def defined(place: Any) -> Any:
        try:
            return at(place)
        except Undefined:  # underflow far out, mostly
            return _context.mpf(0)

    value, error = _context.quad(defined, [low, high], error=True, maxdegree=_QUADRATURE_DEGREE)
    if error > _CLOSE * max(abs(value), _SMALLEST) / 1000:
        raise Undefined("an integral that does not settle")
    return value

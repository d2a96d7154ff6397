r"""The layers for worker processes: formulas at random points, and math-verify for what our grammar leaves out.

Two formulas are equal if they agree at points drawn once and for all. At each point both are computed with 60 and
with 120 digits: a difference that shrinks with the precision is rounding, one that stays is real. So
:math:`\sqrt{6+2\sqrt5} = 1+\sqrt5` is accepted and :math:`\sqrt2 = \sqrt2 + 10^{-40}` is not. There is no
simplification that could run away; the cost is that of a few evaluations.
"""

import logging
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from grail_lightning.answers.compare.estimates import differ, same_but_for_names
from grail_lightning.answers.compare.evaluate import Evaluator, TooLarge, Undefined
from grail_lightning.answers.compare.exact import rational
from grail_lightning.answers.grammar.functions import COMMON, HYPERBOLIC, INVERSE, LOGARITHMS, TRIGONOMETRIC
from grail_lightning.answers.grammar.nodes import Node, letters

__all__ = ["Symbolic", "load"]


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_DIGITS = (60, 120)
# Magnitudes beyond 2^(10^6) are towers of powers; no reference answer is near.
_MAX_LOG2 = 10**6
_MAX_FACTORIAL = 10**6
_NUM_POINTS = 10
_EXTERNAL_CHARACTERS = 400
_KNOWN_COMMANDS = COMMON | _set(
    "frac sqrt pi infty int sum prod lim "
    "to binom lfloor rfloor lceil rceil max min gcd lcm det bmod mod pmod begin end left right cdot circ "
    "overline partial nabla alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma "
    "tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega vec hat bar mathbb in cup cap setminus "
    "emptyset { } |"
)


def load() -> None:
    """Import what answering needs, so that no pair pays for it."""
    import math_verify  # noqa: F401

    _contexts()
    logging.disable(logging.CRITICAL)


@cache
def _contexts() -> tuple[Any, ...]:
    import mpmath

    contexts = []
    for digits in _DIGITS:
        context = mpmath.MPContext()
        context.dps = digits
        contexts.append(context)
    return tuple(contexts)


class Symbolic:
    """Both layers behind the interface that `judge` asks for."""

    def equal(self, left: Node, right: Node, tolerance: float) -> bool:
        """Whether two formulas agree wherever both are defined.

        Args:
            left: the reference.
            right: the prediction.
            tolerance: relative; for formulas without letters only.
        """
        names = sorted(letters(left) | letters(right))
        keep_complex = _mentions(left, "i") or _mentions(right, "i")
        compared = 0
        for positive, point in _points(names):
            agree = _agree(left, right, point, 0.0 if names else tolerance, keep_complex or positive)
            if agree is False:
                return False
            compared += bool(agree)
        return compared >= (2 if names else 1)

    def ratio_sign(self, left: Node, right: Node) -> int:
        """The sign of left/right if it is the same real number at all points and both have the same letters, else 0."""
        names = letters(left)
        if not names or names != letters(right):
            return 0
        context = _contexts()[0]
        ratios = []
        for _, point in _points(sorted(names)):
            one, two = _value(left, point, context), _value(right, point, context)
            if one is not None and two is not None:
                if abs(two) < context.mpf(10) ** -30 or abs(one) < context.mpf(10) ** -30:
                    return 0
                ratios.append(one / two)
        if len(ratios) < 3 or any(abs(ratio - ratios[0]) > abs(ratios[0]) * context.mpf(10) ** -40 for ratio in ratios):
            return 0
        first = context.mpc(ratios[0])
        return 0 if abs(first.imag) > abs(first) * context.mpf(10) ** -40 else (1 if first.real > 0 else -1)

    def external(self, gold: str, prediction: str, tolerance: float) -> bool | None:
        """math-verify's verdict on two formulas, with its false acceptances closed; None if it cannot read one."""
        parsed = [_sympy_of(text) for text in (gold, prediction)]
        if parsed[0] is None or parsed[1] is None:
            return None
        if same_but_for_names(parsed[0], parsed[1]):
            return True
        if differ(parsed[0], parsed[1]):
            return False
        from math_verify import verify

        try:
            accepted = verify(parsed[0], parsed[1], timeout_seconds=None, allow_set_relation_comp=True)
        except Exception:  # a fault of the library's, on a formula that only it can read
            return None
        return bool(accepted) and _relatively_close(parsed[0], parsed[1], tolerance)


def _sympy_of(text: str) -> Any:
    """A formula as SymPy sees it through latex2sympy2-extended, or None."""
    commands = re.findall(r"\\([a-zA-Z]+|.)", text)
    if len(text) > _EXTERNAL_CHARACTERS or not set(commands) <= _KNOWN_COMMANDS:
        return None
    if re.search(r"[!?@#\"`;]|\^\{[^{}]*\^\{[^{}]*\^|[0-9]{40}", text) or text.count("=") > text.count("_{"):
        return None
    from math_verify.parser import LatexExtractionConfig, normalize_latex, parse_latex_cached

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


def _mentions(node: Node, constant: str) -> bool:
    return (node.kind == "constant" and node.value == constant) or any(_mentions(a, constant) for a in node.args)


def _points(names: list[str]) -> list[tuple[bool, dict[str, Fraction]]]:
    """Points with positive coordinates, then with coordinates of any sign; one empty point if there are no names."""
    if not names:
        return [(True, {})]
    draw = random.Random(20_260_101)  # noqa: S311 (no secret: the same points for all, so that a verdict is repeatable)
    points = []
    for place in range(_NUM_POINTS):
        positive = place < _NUM_POINTS // 2
        point = {}
        for name in names:
            value = Fraction(draw.randrange(10_000, 40_000), draw.randrange(10_007, 20_011))
            point[name] = value if positive or draw.random() < 0.5 else -value
        points.append((positive, point))
    return points


def _agree(left: Node, right: Node, point: dict[str, Fraction], tolerance: float, keep_complex: bool) -> bool | None:
    """Whether two formulas are equal at a point; None where one of them is undefined (or not real, if that counts)."""
    differences, size = [], None
    for context in _contexts():
        one, two = _value(left, point, context), _value(right, point, context)
        if one is None or two is None:
            return None
        if not keep_complex and (_imaginary(one) or _imaginary(two)):
            return None
        size = max(abs(one), abs(two))
        differences.append(abs(one - two))
        if differences[-1] <= tolerance * abs(one):
            return True
        if differences[-1] > size * context.mpf(10) ** -15 and size > context.mpf(10) ** -30:
            return False
    context = _contexts()[-1]
    coarse, fine = differences
    return bool(fine <= size * context.mpf(10) ** -100 or fine <= coarse * context.mpf(10) ** -45)


def _imaginary(value: Any) -> bool:
    return bool(abs(value.imag) > abs(value) * 1e-30)


def _value(node: Node, point: dict[str, Fraction], context: Any) -> Any:
    try:
        value = _AtPoint(point, context).value(node)
    except (ZeroDivisionError, Undefined, OverflowError):
        return None
    return value if value is not None and context.isfinite(value) else None


class _AtPoint(Evaluator[Any]):
    """Numbers of many digits (mpmath), with a rational number for each letter."""

    def __init__(self, point: dict[str, Fraction], context: Any) -> None:
        self.point = point
        self.context = context

    def known(self, node: Node) -> Any:
        context = self.context
        if node.kind == "constant":
            return {"pi": context.pi, "e": context.e, "i": context.mpc(0, 1), "inf": context.inf}[str(node.value)] * 1
        exact = self.point[str(node.value)] if node.kind == "symbol" else None if letters(node) else _exact(node)
        return None if exact is None else context.mpf(exact.numerator) / exact.denominator

    def total(self, values: list[Any]) -> Any:
        return sum(values, self.context.mpf(0))

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
            if values[1] == 0:
                raise Undefined("a root of degree zero")
            odd_real = not _imaginary(first) and first.real < 0 and values[1] == int(values[1].real) % 2 * values[1]
            return -((-first) ** (1 / values[1])) if odd_real else self.power(first, 1 / values[1]) if first else first
        if name in ("factorial", "binomial") and max(abs(value) for value in values) > _MAX_FACTORIAL:
            raise TooLarge("a factorial beyond the caps")
        if name in ("exp", *HYPERBOLIC, *TRIGONOMETRIC) and abs(first) > _MAX_LOG2:
            raise TooLarge("an exponential beyond the caps")
        if name in LOGARITHMS and first == 0:
            raise Undefined("the logarithm of zero")
        function = _functions(self.context).get(name)
        if function is None:
            raise Undefined(name)
        return function(*values)


def _exact(node: Node) -> Fraction | None:
    try:
        return rational(node)
    except TooLarge:
        return None


def _functions(context: Any) -> dict[str, Callable[..., Any]]:
    return {
        **{name: getattr(context, name) for name in (*TRIGONOMETRIC, *HYPERBOLIC, "coth", "exp")},
        **{name: getattr(context, name) for name in ("factorial", "binomial", "floor", "ceil")},
        **{inverse: getattr(context, f"a{name}") for name, inverse in INVERSE.items()},
        **dict.fromkeys(LOGARITHMS, context.log),
        "abs": abs,
        "degrees": lambda value: value * context.pi / 180,
    }

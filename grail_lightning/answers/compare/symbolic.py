r"""The layers for worker processes: formulas at random points, and math-verify for what our grammar leaves out.

Two formulas are equal if they agree at points drawn once and for all. At each point both are computed with 60 and
with 120 digits: a difference that shrinks with the precision is rounding, one that stays is real. So
:math:`\sqrt{6+2\sqrt5} = 1+\sqrt5` is accepted and :math:`\sqrt2 = \sqrt2 + 10^{-40}` is not. There is no
simplification that could run away; the cost is that of a few evaluations.
"""

import logging
import random
import re
from fractions import Fraction
from typing import Any

from grail_lightning.answers.compare.numeric import contexts, is_imaginary, value_at
from grail_lightning.answers.grammar.functions import COMMON
from grail_lightning.answers.grammar.nodes import Node, letters, mentions

__all__ = ["equal", "external", "load", "ratio_sign"]

_NUM_POINTS = 10
_EXTERNAL_CHARACTERS = 400
_OTHER_COMMANDS = (
    "frac sqrt pi infty int sum prod lim "
    "to binom lfloor rfloor lceil rceil max min gcd lcm det bmod mod pmod begin end left right cdot circ "
    "overline partial nabla alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma "
    "tau phi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega vec hat bar mathbb in cup cap setminus "
    "emptyset { } |"
)
_KNOWN_COMMANDS = COMMON | frozenset(_OTHER_COMMANDS.split())


def load() -> None:
    """Import what answering needs, so that no pair pays for it."""
    import math_verify  # noqa: F401

    from grail_lightning.answers.compare import estimates  # noqa: F401

    contexts()
    logging.disable(logging.CRITICAL)


def equal(left: Node, right: Node, tolerance: float) -> bool:
    """Whether two formulas agree wherever both are defined.

    Args:
        left: the reference.
        right: the prediction.
        tolerance: relative; for formulas without letters only.
    """
    names = sorted(letters(left) | letters(right))
    keep_complex = mentions(left, "i") or mentions(right, "i")
    compared = 0
    for positive, point in _points(names):
        agree = _agree(left, right, point, 0.0 if names else tolerance, keep_complex or positive)
        if agree is False:
            return False
        compared += bool(agree)
    return compared >= (2 if names else 1)


def ratio_sign(left: Node, right: Node) -> int:
    """The sign of left/right if it is the same real number at all points and both have the same letters, else 0."""
    names = letters(left)
    if not names or names != letters(right):
        return 0
    context = contexts()[0]
    ratios = []
    for _, point in _points(sorted(names)):
        one, two = value_at(left, point, context), value_at(right, point, context)
        if one is not None and two is not None:
            if min(abs(one), abs(two)) < 1e-30:
                return 0
            ratios.append(context.mpc(one / two))
    if len(ratios) < 3:
        return 0
    first, slack = ratios[0], abs(ratios[0]) * 1e-40
    constant = abs(first.imag) <= slack and all(abs(ratio - first) <= slack for ratio in ratios)
    return (1 if first.real > 0 else -1) if constant else 0


def external(gold: str, prediction: str, tolerance: float) -> bool | None:
    """math-verify's verdict on two formulas, with its false acceptances closed; None if it cannot read one."""
    from math_verify import verify

    from grail_lightning.answers.compare.estimates import differ, same_but_for_names

    one, two = _sympy_of(gold), _sympy_of(prediction)
    if one is None or two is None:
        return None
    if same_but_for_names(one, two):
        return True
    if differ(one, two):
        return False
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
    differences: list[Any] = []
    size: Any = None
    for context in contexts():
        one, two = value_at(left, point, context), value_at(right, point, context)
        if one is None or two is None:
            return None
        if not keep_complex and (is_imaginary(one) or is_imaginary(two)):
            return None
        size = max(abs(one), abs(two))
        differences.append(abs(one - two))
        if differences[-1] <= tolerance * abs(one):
            return True
        if differences[-1] > size * 1e-15 and size > 1e-30:
            return False
    coarse, fine = differences
    return bool(fine <= size * 1e-100 or fine <= coarse * 1e-45)

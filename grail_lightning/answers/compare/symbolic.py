r"""Formulas at random points: a layer for worker processes.

Two formulas are equal if they agree at points drawn once and for all. At each point both are computed with 60 and
with 120 digits: a difference that shrinks with the precision is rounding, one that stays is real. So
:math:`\sqrt{6+2\sqrt5} = 1+\sqrt5` is accepted and :math:`\sqrt2 = \sqrt2 + 10^{-40}` is not. There is no
simplification that could run away; the cost is that of a few evaluations.
"""

import logging
import random
from fractions import Fraction
from typing import Any

from grail_lightning.answers.compare.numeric import contexts, is_imaginary, value_at
from grail_lightning.answers.grammar.nodes import Node, letters, mentions

__all__ = ["equal", "load", "ratio_sign"]

_NUM_POINTS = 5  # of each kind


def load() -> None:
    """Import what answering needs, so that no pair pays for it."""
    from grail_lightning.answers.compare import external  # noqa: F401

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


def _points(names: list[str]) -> list[tuple[bool, dict[str, Fraction]]]:
    """Points with positive coordinates, then with coordinates of any sign; one empty point if there are no names."""
    if not names:
        return [(True, {})]
    draw = random.Random(20_260_101)  # noqa: S311 (no secret: the same points for all, so that a verdict is repeatable)
    points = []
    for positive in [True] * _NUM_POINTS + [False] * _NUM_POINTS:
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

"""Formulas without letters as floats: near enough to order the ends of intervals."""

import cmath
import math
from collections.abc import Callable

from grail_lightning.answers.compare.evaluate import Evaluator
from grail_lightning.answers.compare.exact import rational
from grail_lightning.answers.grammar.functions import HYPERBOLIC, LOGARITHMS
from grail_lightning.answers.grammar.nodes import Node

__all__ = ["approximate"]

_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "inf": complex(math.inf)}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "exp", *HYPERBOLIC)},
    **{f"arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")},
    **dict.fromkeys(LOGARITHMS, cmath.log),
    "sec": lambda value: 1 / cmath.cos(value),
    "abs": lambda value: complex(abs(value)),
    "degrees": lambda value: value * math.pi / 180,
}


def approximate(node: Node) -> float | None:
    """A float near a real formula without letters, for ordering the ends of intervals; None if there is none."""
    try:
        value = _FLOATS.value(node)
    except (ArithmeticError, ValueError):
        return None
    return value.real if value is not None and abs(value.imag) <= 1e-9 * (1 + abs(value)) else None


class _Floats(Evaluator[complex]):
    """Complex floats, rounded from the exact value where there is one."""

    def known(self, node: Node) -> complex | None:
        exact = rational(node)
        if exact is not None:
            return complex(float(exact))
        return _CONSTANTS[str(node.value)] if node.kind == "constant" else None

    def total(self, values: list[complex]) -> complex:
        return complex(math.fsum(value.real for value in values), math.fsum(value.imag for value in values))

    def power(self, base: complex, exponent: complex) -> complex:
        return base**exponent

    def function(self, name: str, values: list[complex]) -> complex | None:
        if name == "root":
            return values[0] ** (1 / values[1])
        return _FUNCTIONS[name](values[0]) if name in _FUNCTIONS else None


_FLOATS = _Floats()

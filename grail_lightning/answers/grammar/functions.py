"""The functions that have a name, in the groups in which rules speak of them."""

__all__ = ["COMMON", "ELEMENTARY", "FUNCTIONS", "HYPERBOLIC", "INVERSE", "LOGARITHMS", "TRIGONOMETRIC"]

TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
INVERSE = {name: f"arc{name}" for name in TRIGONOMETRIC}
HYPERBOLIC = ("sinh", "cosh", "tanh")
LOGARITHMS = ("ln", "log")
# A text in which one of these stands is a formula, not a unit or a name.
ELEMENTARY = (*TRIGONOMETRIC, *LOGARITHMS, "exp")
# What answers use, and what every library knows.
COMMON = frozenset([*ELEMENTARY, "arcsin", "arccos", "arctan", *HYPERBOLIC])
# All that the parser reads.
FUNCTIONS = COMMON | frozenset([*INVERSE.values(), "coth"])

"""The functions, letters and constants that have a name, in the groups in which rules speak of them."""

__all__ = ["BARE_WORDS", "COMMON", "ELEMENTARY", "FUNCTIONS", "GREEK", "GREEK_LETTERS"]
__all__ += ["HYPERBOLIC", "INVERSE", "LOGARITHMS", "TRIGONOMETRIC"]

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
# Constants that are written as words, too.
BARE_WORDS = {"pi": "pi", "infinity": "inf", "infty": "inf", "inf": "inf", "oo": "inf"}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK_LETTERS = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK_NAMES.split(), strict=True))
# Those that are no number, and what answers use like them.
GREEK = frozenset([*GREEK_LETTERS.values(), "Upsilon", "hbar", "ell"]) - {"pi"}

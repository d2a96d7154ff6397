"""The pieces of a formula: what the parser reads one at a time, and the names it knows."""

import re

__all__ = [
    "BARE_WORDS",
    "CLOSING",
    "DOTS",
    "FUNCTION_LETTERS",
    "GREEK",
    "SCIENTIFIC",
    "TOKEN",
]


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


GREEK = _set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell"
)
FUNCTION_LETTERS = "fghFGHPQVTIuvy"
DOTS = (r"\cdots", r"\ldots", r"\dots")
CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
BARE_WORDS = {"pi": "pi", "infinity": "inf", "infty": "inf", "inf": "inf", "oo": "inf"}
# `1e-5` inside a formula; not `2e-5`, which is 2·e − 5.
_E_LITERAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+|1)[eE][+-]?[0-9]{1,3}|[0-9]+(?:E[+-]?|e|e[+-]0)[0-9]{1,3}"
TOKEN = re.compile(
    rf"(?P<number>(?:{_E_LITERAL})(?![0-9.])|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"|\\(?P<command>[a-zA-Z]+|.)"
    r"|(?P<word>(?:arc)?(?:sinh?|cosh?|tanh?|cot|sec|csc)(?![a-z])|ln(?![a-z])|log(?![a-z])|exp(?![a-z])|sqrt(?![a-z])"
    r"|infinity|infty|inf(?![a-z])|oo(?![a-z])|pi(?![a-z]))|(?P<letter>[a-zA-Z])|(?P<other>\S)|\s+",
    re.ASCII,
)
SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]([+-]?[0-9]{1,4})", re.ASCII)

"""math-verify's verdict on what our grammar leaves out.

It works on SymPy trees, walked and never printed, so no text of a model becomes code; it may seek a closed form for
ever, so it runs in a worker.
"""

import re
from typing import Any

from grail_lightning.answers.normalise import FUNCTIONS, GREEK
from grail_lightning.answers.values import prepare

_MOST_CHARACTERS = 400
_OTHER_COMMANDS = (
    "frac sqrt pi infty int sum prod lim to binom lfloor rfloor lceil rceil max min gcd lcm det bmod mod pmod begin "
    "end left right cdot circ overline partial nabla vec hat bar mathbb in cup cap setminus emptyset { } |"
)
_KNOWN_COMMANDS = FUNCTIONS | GREEK | frozenset(_OTHER_COMMANDS.split())


def load_libraries() -> None:
    """Import what takes a while, so that no pair pays for it."""
    import math_verify  # noqa: F401

    prepare()


def equal_by_math_verify(gold: str, prediction: str, tolerance: float) -> bool | None:
    """math-verify's verdict on two formulas, with its false acceptances closed; None if it cannot read one."""
    import sympy
    from math_verify import verify

    first, second = _sympy_of(gold), _sympy_of(prediction)
    if first is None or second is None:
        return None
    if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr) and first.as_dummy() == second.as_dummy():
        return True  # a sum over n and one over k
    for side in (first, second):
        if isinstance(side, sympy.Basic) and side.has(sympy.Sum) and side.has(sympy.oo) and side.free_symbols:
            return False  # the search for a closed form of a power series rarely ends
    try:
        accepted = verify(first, second, timeout_seconds=None, allow_set_relation_comp=True)
    except Exception:  # a fault of the library's, on a formula that only it can read
        return None
    return bool(accepted) and _relatively_close(first, second, tolerance)


# What the library misreads: primes, bases, cycles, hexadecimal digits, derivatives, functions of letters.
_MISREAD = re.compile(
    r"'|(?<![A-Za-z\\}^])[0-9]\s*_|(?<![_^0-9])[0-9]+\s+[0-9]|(?<![A-Za-z\\0-9])[A-F][0-9]|\\partial"
    r"|\\frac\s*\{\s*d\s*(?:\^[^{}]*)?[A-Za-z]?[^{}]*\}\s*\{\s*d\s*[A-Za-z]|\\(?:gcd|lcm)(?=[^A-Za-z]*[A-Za-z])"
)


def _sympy_of(text: str) -> Any:
    """A formula as SymPy sees it through latex2sympy2-extended, or None."""
    commands = re.findall(r"\\([a-zA-Z]+|.)", text)
    if len(text) > _MOST_CHARACTERS or not set(commands) <= _KNOWN_COMMANDS:
        return None
    if re.search(r"[!?@#\"`;]|\^\{[^{}]*\^\{[^{}]*\^|[0-9]{40}", text) or text.count("=") > text.count("_{"):
        return None
    if _MISREAD.search(text):
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
        z, w = complex(gold.evalf(30)), complex(prediction.evalf(30))
        return bool(abs(z - w) <= (tolerance * abs(z) if z else 1e-25))  # 30 digits of zero are rarely zero
    except (TypeError, ValueError, AttributeError):
        return True
    except OverflowError:  # a number beyond floats
        return bool(gold == prediction)

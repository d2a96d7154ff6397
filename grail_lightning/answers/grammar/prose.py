r"""Answers that are sentences: the same words in the same order, and between them formulas that can be compared.

`lowest_terms` is for what no grammar cuts: literals are spelled one way inside any text, so that two texts that differ
in nothing else are the same string.
"""

import math
import re

from grail_lightning.answers.grammar.functions import BARE_WORDS, FUNCTIONS
from grail_lightning.answers.grammar.parser import E_NOTATION

__all__ = ["Sentence", "e_notation_spelled_out", "is_e_notation", "lowest_terms", "sentence"]

Sentence = tuple[tuple[str, ...], tuple[str, ...]]

_FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", re.ASCII)
# A whole number to the power of one half that is nobody's script or argument: behind `_`, `^`, `}`, a letter or a digit
# it could be one, unless that ends a complete factor.
_HALF_POWER = re.compile(
    r"(?:(\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\})|(?<![A-Za-z}\]^_.,\\])|(?<=\^\{1/2\}))"
    r"(?:\{([0-9]+)\}|(?<![0-9])([0-9]+))\^(?:\{1/2\}|\{\\frac\{1\}\{2\}\}|\\frac\{1\}\{2\})",
    re.ASCII,
)
_E_LITERAL = re.compile(r"(?<![0-9.A-Za-z\\])((?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]([+-]?[0-9]{1,3})(?![0-9.])", re.ASCII)
_WORD = re.compile(r"(?<![\\A-Za-z])(?<!begin\{)(?<!end\{)[A-Za-z]{2,}(?![A-Za-z])", re.ASCII)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_FORMULA_WORDS = FUNCTIONS | BARE_WORDS.keys() | {"sqrt"}
# One word is a unit or a joint (`and`), which other rules know better.
_FEWEST_WORDS = 2
_MOST_FORMULAS = 32


def lowest_terms(text: str) -> str:
    r"""The text with each `\frac` of two whole numbers in lowest terms, and `n^{1/2}` as `\sqrt{n}`.

    One spelling of a number replaces another in its place, so a text keeps its meaning whatever it is.

    Args:
        text: what `normalise` returned.
    """
    return _HALF_POWER.sub(_as_root, _FRACTION.sub(_reduced, text))


def _as_root(found: re.Match[str]) -> str:
    return rf"{found[1] or ''}\sqrt{{{found[2] or found[3]}}}"


def _reduced(found: re.Match[str]) -> str:
    upper, lower = int(found[1]), int(found[2])
    if not lower:
        return found[0]
    common = math.gcd(upper, lower)
    return rf"\frac{{{upper // common}}}{{{lower // common}}}"


def is_e_notation(text: str) -> bool:
    """Whether a whole answer is one number such as `2e-5`."""
    return E_NOTATION.fullmatch(text) is not None


def e_notation_spelled_out(text: str) -> str:
    r"""`2e-5+0` as `2*10^{-5}+0`: for an answer whose reference is in e-notation, where `2e-5` is not 2·e − 5.

    Args:
        text: what `normalise` returned.
    """
    rest = _E_LITERAL.sub("", text.lstrip("+-"))
    if not re.search(r"[-+*/^(]|\\frac|\\sqrt", rest):  # one number, perhaps with its unit
        return text
    return _E_LITERAL.sub(r"(\1*10^{\2})", text)


def sentence(text: str, *, ignore_case: bool) -> Sentence | None:
    """The words of an answer and the formulas before, between and behind them; None if it is not a sentence.

    Args:
        text: what `normalise` returned.
        ignore_case: whether words are told in lower case.
    """
    text = _TEXT.sub(lambda found: f" {found[1].lower() if ignore_case else found[1]} ", text)
    words, formulas, start = [], [], 0
    for found in _WORD.finditer(text):
        word = found[0]
        if word.lower() in _FORMULA_WORDS:
            continue
        words.append(word.lower() if ignore_case else word)
        formulas.append(text[start : found.start()].strip(" .,;:"))
        start = found.end()
    formulas.append(text[start:].strip(" .,;:"))
    if len(words) < _FEWEST_WORDS or sum(map(bool, formulas)) > _MOST_FORMULAS:
        return None
    return tuple(words), tuple(formulas)

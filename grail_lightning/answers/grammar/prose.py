r"""Answers that are sentences: the same words in the same order, and between them formulas that can be compared.

`lowest_terms` is for what no grammar cuts: literals are spelled one way inside any text, so that two texts that differ
in nothing else are the same string.
"""

import re
from fractions import Fraction

from grail_lightning.answers.grammar.brackets import TEXT
from grail_lightning.answers.grammar.functions import BARE_WORDS, FUNCTIONS
from grail_lightning.answers.grammar.kinds import Answer, Leaf, Words
from grail_lightning.answers.grammar.parser import E_NOTATION

__all__ = ["anagrams", "e_spelled_out", "lowest_terms", "same_wording", "sentence", "spelled_alike", "wordy"]

_Sentence = tuple[tuple[str, ...], tuple[str, ...]]

_FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{(0*[1-9][0-9]*)\}", re.ASCII)
# A whole number to the power of one half that is nobody's script or argument: behind `_`, `^`, `}`, a letter or a digit
# it could be one, unless that ends a complete factor.
_HALF_POWER = re.compile(
    r"(?:(\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\})|(?<![A-Za-z}\]^_.,\\])|(?<=\^\{1/2\}))"
    r"(?:\{([0-9]+)\}|(?<![0-9])([0-9]+))\^(?:\{1/2\}|\{\\frac\{1\}\{2\}\}|\\frac\{1\}\{2\})",
    re.ASCII,
)
_E_LITERAL = re.compile(r"(?<![0-9.A-Za-z\\])((?:[0-9]+\.?[0-9]*|\.[0-9]+))[eE]([+-]?[0-9]{1,3})(?![0-9.])", re.ASCII)
_WORD = re.compile(r"(?<![\\A-Za-z])(?<!begin\{)(?<!end\{)[A-Za-z]{2,}(?![A-Za-z])", re.ASCII)
_FORMULA_WORDS = FUNCTIONS | BARE_WORDS.keys() | {"sqrt"}
_WRAPPED_WORD = re.compile(r"\\text\{[^{}]*[A-Za-z]\.?[A-Za-z][^{}]*\}", re.ASCII)
_WORDING = re.compile(r"[A-Za-z0-9 ,.:;'!?/()-]+", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*")
_WORDY = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{4,}|\?|\"")
# One word is a unit or a joint (`and`), which other rules know better.
_FEWEST_WORDS = 2
_MOST_FORMULAS = 32


def lowest_terms(text: str) -> str:
    r"""The text with each `\frac` of two whole numbers in lowest terms, and `n^{1/2}` as `\sqrt{n}`.

    One spelling of a number replaces another in its place, so a text keeps its meaning whatever it is.

    Args:
        text: what `normalise` returned.
    """
    return _HALF_POWER.sub(r"\1\\sqrt{\2\3}", _FRACTION.sub(_reduced, text))


def _reduced(found: re.Match[str]) -> str:
    value = Fraction(int(found[1]), int(found[2]))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def e_spelled_out(text: str, gold: str) -> str:
    r"""`2e-5+0` as `2*10^{-5}+0` where the reference is a number in e-notation: there `2e-5` is not 2·e − 5.

    Args:
        text: an answer, what `normalise` returned.
        gold: the reference, likewise.
    """
    rest = _E_LITERAL.sub("", text.lstrip("+-"))
    formula = re.search(r"[-+*/^(]|\\frac|\\sqrt", rest)  # or one number, perhaps with its unit
    return _E_LITERAL.sub(r"(\1*10^{\2})", text) if formula and E_NOTATION.fullmatch(gold) else text


def sentence(text: str, *, ignore_case: bool) -> _Sentence | None:
    """The words of an answer and the formulas before, between and behind them; None if it is not a sentence.

    Args:
        text: what `normalise` returned.
        ignore_case: whether words are told in lower case.
    """
    text = TEXT.sub(lambda found: f" {found[1].lower() if ignore_case else found[1]} ", text)
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


def same_wording(one: str, two: str, *, ignore_case: bool) -> bool:
    r"""Whether two answers without formulas are the same but for upright type around words, as `\text{June 20}`.

    Args:
        one: what `normalise` returned.
        two: likewise.
        ignore_case: whether words may differ in case; letters behind a digit are taken as they are.
    """
    if not (_WRAPPED_WORD.search(one) or _WRAPPED_WORD.search(two)):
        return False
    plain = [_plain(text) for text in (one, two)]
    if not all(map(_WORDING.fullmatch, plain)):
        return False
    if ignore_case and not re.search(r"[0-9] ?[A-Za-z]", plain[0] + "|" + plain[1]):
        plain = [text.lower() for text in plain]
    return plain[0] == plain[1]


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text))
    return re.sub(r" ?([,.:;!?/()-]) ?", r"\1", text).strip(' "').rstrip(".!")


def spelled_alike(one: Answer, two: Answer, *, ignore_case: bool) -> bool:
    """Whether one answer is words and the other the same letters without upright type: `odd` is no product then."""
    words, bare = (one, two) if isinstance(one, Words) else (two, one)
    if not isinstance(words, Words) or not isinstance(bare, Leaf) or not _LETTERS.fullmatch(bare.quantity.text):
        return False
    text = bare.quantity.text
    return words.exact.lower() == text.lower() if ignore_case else words.exact == text


def anagrams(one: str, two: str) -> bool:
    """Whether two texts are words of the same letters, which a letter that comes twice tells from products: `SAS`."""
    words = [text.lower() for text in (one, two) if text.isascii() and text.isalpha() and len(text) > 2]
    return len(words) == 2 and words[0] != words[1] and len(set(words[0])) < len(words[0])


def wordy(text: str) -> bool:
    """Whether a formula that cannot be read has words in it, which no mathematical library should see."""
    return bool(_WORDY.search(text))

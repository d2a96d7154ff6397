"""Numbers in English words: `twenty-one`, `five million`, `two and a half`, `three sevenths`, `minus seven`."""

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from grail_lightning.answers.lexicon import CARDINALS, MULTIPLES, PARTS, singular

_SPELLED = re.compile(rf"\b(?:{'|'.join([*CARDINALS, *MULTIPLES, *PARTS])})", re.IGNORECASE)


def _cardinal(words: Sequence[str]) -> tuple[Fraction | None, int]:
    """The value of the cardinal number that words begin with, and how many of them it takes."""
    total, group, last, place = Fraction(0), Fraction(0), 10**18, 0
    seen = False
    while place < len(words):
        word = words[place]
        if word == "and" and seen and place + 1 < len(words) and words[place + 1] in CARDINALS and group % 100 == 0:
            place += 1
            continue
        value = CARDINALS.get(word)
        if value is not None:
            within = group % 100
            if seen and (within and not (within % 10 == 0 and within >= 20 and 0 < value < 10)):
                break
            group += value
        elif (multiple := multiple_of(word)) is not None:
            if not seen and place and words[0] not in ("a", "an"):
                break
            if multiple == 100 and group < 100:
                group = (group or Fraction(1)) * 100
            elif multiple < last or total == 0:
                total, group, last = total + (group or Fraction(1)) * multiple, Fraction(0), multiple
            else:
                break
        elif word in ("a", "an") and place == 0 and len(words) > 1 and multiple_of(words[1]):
            place += 1
            continue
        else:
            break
        seen = True
        place += 1
    return (total + group, place) if seen else (None, 0)


def multiple_of(word: str) -> int | None:
    """The number of `hundred`, `millions`, `dozen`."""
    return MULTIPLES.get(word) or MULTIPLES.get(word.removesuffix("s"))


def _part(words: Sequence[str], count: Fraction | None) -> tuple[Fraction, int] | None:
    """The value of `third`, `sevenths` behind a number, and how many words it takes."""
    if not words:
        return None
    word = words[0]
    taken = 1
    if word == "basis" and words[1:2] in (["points"], ["point"]):
        word, taken = "basis-points", 2
    single = word in PARTS and word != "halve"
    name = word if single else "half" if word == "halves" else singular(word)
    if name not in PARTS or (name not in ("half", "permille", "basis-point") and single and count not in (1, None)):
        return None
    return Fraction(1, PARTS[name]), taken


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@lru_cache(maxsize=1 << 12)
def spelled(plain: str) -> tuple[str, str] | None:
    """Of words that begin with a number in words, that number and the rest; None if they do not."""
    if not _SPELLED.search(plain) or re.search(", *[a-z]", plain):
        return None
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", plain.lower()).replace(",", " ").split()
    sign = "-" if words[0] in ("minus", "negative") else ""
    words = words[1:] if sign else words
    value, taken = _cardinal(words)
    rest = words[taken:]
    if value is None and rest[:1] in (["a"], ["an"]):  # `a third`
        part = _part(rest[1:], Fraction(1))
        if part is not None:
            value, rest = part[0], rest[1 + part[1] :]
    elif value is None and rest[:1] == ["half"]:
        value, rest = Fraction(1, 2), rest[1:]
        if rest[:1] in (["a"], ["an"]) and rest[1:] and (multiple := multiple_of(rest[1])):  # `half a million`
            value, rest = value * multiple, rest[2:]
    elif (
        value is not None
        and rest[:1] == ["point"]
        and rest[1:]
        and all(CARDINALS.get(word, 10) < 10 for word in rest[1:])
    ):
        digits = "".join(str(CARDINALS[word]) for word in rest[1:])
        value, rest = value + Fraction(int(digits), 10 ** len(digits)), []
    elif value is not None:
        part = _part(rest, value)
        if part is not None:
            value, rest = value * part[0], rest[part[1] :]
        value, rest = _and_part(value, rest)
    if value is None:
        return None
    return sign + _written(value), " ".join(rest)


def _and_part(value: Fraction, rest: list[str]) -> tuple[Fraction, list[str]]:
    """The number with `and a half`, `and two thirds` behind it."""
    if rest[:1] != ["and"] or value.denominator != 1:
        return value, rest
    count, taken = (Fraction(1), 1) if rest[1:2] in (["a"], ["an"]) else _cardinal(rest[1:])
    if count is None and rest[1:2] and re.fullmatch("[0-9]+", rest[1]):
        count, taken = Fraction(int(rest[1])), 1
    part = _part(rest[1 + taken :], count) if count is not None else None
    if part is None or count is None or count * part[0] >= 1:
        return value, rest
    return value + count * part[0], rest[1 + taken + part[1] :]


_LITERAL = re.compile(r"([+-]?)([0-9]*\.?[0-9]+)", re.ASCII)


def scaled(core: str, tail: str) -> tuple[str, str] | None:
    """The number times the words behind it, such as `million` and `sevenths`, and the other words; None without."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", tail.lower()).split()
    literal = _LITERAL.fullmatch(core)
    if not words or not literal:
        return None
    value, rest = Fraction(literal[2]), words
    while rest and (multiple := multiple_of(rest[0])) is not None:
        value, rest = value * multiple, rest[1:]
    if len(rest) == len(words) and (part := _part(rest, value)) is not None:
        value, rest = value * part[0], rest[part[1] :]
    value, rest = _and_part(value, rest)
    if rest[:1] == ["factorial"] and len(rest) == len(words):
        return f"{core}!", " ".join(rest[1:])
    return None if len(rest) == len(words) else (literal[1] + _written(value), " ".join(rest))

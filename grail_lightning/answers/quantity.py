r"""A number and the words around it: `split_words` cuts a formula from its unit, its counted noun and its phrases.

Words go by the lists of `lexicon`. A kind (a unit, a currency, `%`, degrees, a noun) may be missing on one side; two
kinds must be the same, and nothing is converted. Words that are in no list are never dropped: `5 theta` is not 5.
"""

import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from grail_lightning.answers.lexicon import (
    AMBIGUOUS,
    COUNTED,
    DESCRIBING,
    MONTHS,
    PLURAL,
    QUALIFIERS,
    SYMBOLS,
    TOTALS,
    TYPED_UNITS,
    UNCOUNTABLE,
    singular,
    unit_name,
)
from grail_lightning.answers.normalise import CACHED_CHARACTERS, ELEMENTARY, TEXT, TRIGONOMETRIC
from grail_lightning.answers.numerals import multiple_of, scaled

FUNCTION_WORDS = frozenset([*ELEMENTARY, *"sqrt pi max gcd lcm lim det arg mod inf infty".split()])  # noqa: SIM905


class Said(NamedTuple):
    """What the words around a number say.

    The kind is such as `cm^2`, `%`, `deg`, `dollar*h^-1`, or `?red apple` for nouns; `known` if it is harmless. The
    qualifier follows a kind, as `clockwise` and `in total`; `mild` if it is harmless.
    """

    kind: str = ""
    known: bool = True
    qualifier: str = ""
    mild: bool = True

    @property
    def bare(self) -> bool:
        """Whether a number may say the same without these words."""
        return self.known and self.mild


NOTHING = Said()
_LENGTHS = frozenset("m cm km mm in ft yd mi".split())  # noqa: SIM905
_MONEY = frozenset("dollar cent euro gbp yen rupee yuan pound".split())  # noqa: SIM905


def agree(one: Said, two: Said, *, missing: bool = True) -> bool:
    """Whether two numbers with these words may be equal; a bare number with one of a kind if that may be `missing`."""
    if one == two:
        return True
    for bare, other in ((one, two), (two, one)):
        if not bare.kind and not bare.qualifier:
            return missing and other.bare
    if not _kinds_agree(one.kind, two.kind):
        return False
    return one.qualifier == two.qualifier or (not (one.qualifier and two.qualifier) and one.mild and two.mild)


def _kinds_agree(kind: str, other: str) -> bool:
    if kind == other:
        return True
    if {kind, other} <= {"deg", "degC", "rad"} or {kind, other} <= {"deg", "degF"}:  # radians have another value
        return True
    (first, _, power), (second, _, other_power) = kind.partition("^"), other.partition("^")
    if "unit" in (first, second) and {first, second} & _LENGTHS:
        return power == other_power and "*" not in kind + other
    if first in AMBIGUOUS.get(second, ()) or second in AMBIGUOUS.get(first, ()):
        return power == other_power
    # A price may tell what it is for: `$3.50 per pound` for `$3.50`.
    shorter, longer = sorted((kind, other), key=len)
    return shorter in _MONEY and sorted([shorter, *longer.split("*")])[1:] != [shorter] and _is_price(longer, shorter)


def _is_price(kind: str, money: str) -> bool:
    factors = kind.split("*")
    return money in factors and all(factor == money or factor.endswith("^-1") for factor in factors)


# units
_FACTOR = re.compile(r"([a-z$%°?]+)\.?(?:\^?\{?(-?[1-9])\}?)?")
_MEGA = re.compile(r"\bM(?=[WmgVAJNL]\b)")
_IN_WORDS = {
    **{"degree of freedom": "df", "degrees of freedom": "df"},
    **{"light year": "lightyear", "nautical mile": "nauticalmile", "fluid ounce": "floz", "fl oz": "floz"},
}
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3, "cu": 3}
# What else is a product of other units.
_DERIVED = {
    **{"j": "kg*m^2*s^-2", "n": "kg*m*s^-2", "w": "kg*m^2*s^-3", "pa": "kg*m^-1*s^-2", "kj": "kn*m", "cc": "cm^3"},
    **{"hz": "s^-1", "mph": "mi*h^-1", "kph": "km*h^-1"},
}
_PER = re.compile(r"\s*/\s*|(?:^|\s+)per\s+(?:each\s+|every\s+|an?\s+|the\s+)?|(?<=[a-z])\s+(?:an?|every)\s+")
_ARTICLE = re.compile(r"\b(?:the|an?)\s+")


def _unit_key(text: str) -> str | None:
    """The factors of a unit, such as `cm^3*s^-1`; None if it is not known."""
    powers = Counter[str]()
    over, *unders = _PER.split(text)
    if not over and not unders:
        return None
    for sign, part in [(1, over), *((-1, under) for under in unders)]:
        factors = _factors(part.strip()) if part.strip() else [] if sign == 1 else None
        if factors is None:
            return None
        for name, power in factors:
            for derived in _DERIVED.get(name, name).split("*"):
                base, _, exponent = derived.partition("^")
                powers[base] += sign * power * int(exponent or 1)
    if any(abs(power) > 4 or (abs(power) > 1 and (name in _MONEY or name[0] == "?")) for name, power in powers.items()):
        return None
    return "*".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()) if power)


def _factors(part: str) -> list[tuple[str, int]] | None:
    """The units of a product with their powers."""
    pieces = [piece for piece in re.split(r"[\s*]+|(?<=[a-z])-(?=[a-z])", part) if piece]
    if (name := _IN_WORDS.get(part.replace("-", " ").removesuffix("s"))) is not None:
        return [(name, 1)]
    power_of_all = 1
    for place in (0, -1):
        if len(pieces) > 1 and pieces[place].rstrip(".") in _POWER_WORDS:
            power_of_all = _POWER_WORDS[pieces.pop(place).rstrip(".")]
    factors: list[tuple[str, int]] = []
    for piece in pieces:
        factor = _FACTOR.fullmatch(piece)
        name = unit_name(factor[1]) if factor else None
        if name is None or factor is None:
            noun = _noun_key(part)
            return [(f"?{noun}", 1)] if noun else None
        twice = unit_name(pieces[0].rstrip(".")) == name and unit_name(pieces[1 % len(pieces)].rstrip(".")) == name
        if len(pieces) > 1 and not twice and factor[1] not in SYMBOLS and not {"*", "-"} & {*part}:
            return None
        if factors[-1:] != [(name, 1)]:  # `dollars USD`
            factors.append((name, int(factor[2] or 1) * power_of_all))
    return factors or None


def _noun_key(text: str) -> str | None:
    """A counted noun and what describes it, in the singular: `red apple`."""
    *before, last = _ARTICLE.sub("", text).split() or [""]
    if singular(last) not in COUNTED or not all(word in DESCRIBING or word in COUNTED for word in before):
        return None
    if last in PLURAL and not before:
        return None
    return " ".join([*before, singular(last)])


# phrases
_ALL = "|".join(sorted(map(re.escape, TOTALS), key=len, reverse=True))
_TOTALS = re.compile(rf"^(?:{_ALL})\b\s*|\s*,?\s*\b(?:{_ALL})$")
_PLACE = re.compile(
    r"(of|in|on|at|for|from|with)\s+(?:(?:the|an?|each|every|his|her|their|its|this|these|those)\s+)?(.+)"
)
_MONTHS = frozenset(name for name, first in TYPED_UNITS.items() if first in MONTHS and len(name) > 2)
_SIDES = frozenset(["left", "over"])  # what is left of counted things; of a length it would be a direction


@lru_cache(maxsize=1 << 12)
def classify(tail: str) -> Said:
    """What the words beside a number say, in their order."""
    tail = _MEGA.sub("mega", tail)  # `MW` is not `mW`
    plain = re.sub(r"\bms\^-1", "m*s^-1", re.sub(r"(?<=N) ?m\b", "*m", tail))
    plain = re.sub(r"\s+", " ", plain.lower()).strip(" .,;!")
    plain = re.sub(r"^\((.*)\)$", r"\1", plain)
    for _ in range(3):
        plain = _TOTALS.sub("", plain).strip(" ,")
    if not plain:
        return NOTHING
    tokens = plain.split()
    for count in range(min(len(tokens), 8), 0, -1):
        kind = _kind(" ".join(tokens[:count]))
        if kind is not None:
            qualifier = " ".join(_ARTICLE.sub("", " ".join(tokens[count:])).split())
            return Said(kind, True, qualifier, _is_mild(qualifier, kind))
    if _is_mild(plain, ""):
        return Said("", True, plain, True)
    return Said("?" + " ".join(map(singular, _ARTICLE.sub("", plain).split())), False)


def _kind(text: str) -> str | None:
    if text in ("%", "percent", "pct", "per cent", "percents"):
        return "%"
    if text.startswith("°"):
        return {"°": "deg", "°c": "degC", "°f": "degF", "° c": "degC", "° f": "degF"}.get(text)
    if text in ("deg", "degree", "degrees"):
        return "deg"
    if scale := re.fullmatch(r"(?:°|degrees?) ?(c|f|celsius|fahrenheit|centigrade)", text):
        return "degF" if scale[1][0] == "f" else "degC"
    text = re.sub(r"^(?:dollar )+(?=dollar|usd)|(?<=dollar) (?:dollars|usd)\b", "", text)
    return _unit_key(text)


def _is_mild(qualifier: str, kind: str) -> bool:
    if not qualifier or qualifier in QUALIFIERS:
        return True
    if qualifier in _SIDES:
        return kind.startswith("?")
    place = _PLACE.fullmatch(qualifier)
    if place is None:
        return False
    where = place[2]
    return where in _MONTHS or _noun_key(where) is not None or (singular(where.split()[-1]) in UNCOUNTABLE and (
        all(word in DESCRIBING or word in UNCOUNTABLE or word in COUNTED for word in where.split())
    ))  # fmt: skip


# the words around a formula
CURRENCIES = {r"\$": "dollar", "£": "gbp", "€": "euro", "¥": "yen", "₹": "rupee", "₽": "ruble", "₩": "won"}
_SIGN = "|".join(map(re.escape, CURRENCIES))
_MONEY_BEFORE = re.compile(rf"([+-]?)\s*(?:US|CA|A)?({_SIGN})\s*([+-]?)")
_MONEY_BEHIND = re.compile(rf"\s*({_SIGN})$")
_PERCENT = re.compile(r"\s*%$")
_DEGREES = re.compile(r"\s*\^\{?\s*\\circ\s*\}?\s*([CF])?\s*$")
_TYPED = re.compile(r"\s*\\text\{([^{}]*)\}(?:\s*\^\{?\s*(-?[1-9])\s*\}?)?$|\s*\(\s*\\text\{([A-Za-z/ ^0-9]*)\}\s*\)$")
_UNTYPED = re.compile(
    r"(?:(?<=[0-9})!])|(?<=\\pi)|(?<=\\infty))(?P<gap>\s?)(?P<words>[A-Za-z](?:[A-Za-z'./ *,-]|\^\{?-?[1-9]\}?)*)$"
)
_EACH = re.compile(r"(?<=[0-9])\s?/\s?([A-Za-z]{3,})$")
_NUMBER_AHEAD = r"[+-]?(?:[0-9.]|\\(?:frac|sqrt|pi|\$)|[£€¥])"
_BEFORE = re.compile(
    rf"(?:\\text\{{([^{{}}]*)\}}\s*(?={_NUMBER_AHEAD}|[a-zA-Z](?![A-Za-z]))"
    rf"|((?:[A-Za-z]{{3,}}|an? [A-Za-z]{{3,}})\.? (?:[A-Za-z]{{2,}}\.? )*)\s*(?={_NUMBER_AHEAD}))"
)
# The angle in `\sin 30^\circ` has the degrees, not the answer.
_OF_ANGLE = re.compile(rf"\\(?:cis|{'|'.join(TRIGONOMETRIC)})")
# `\text{ft}/s`: a single letter loses its `\mathrm` when it is normalised.
_PER_LETTER = re.compile(r"(?<=\})\s*/\s*([a-zA-Z]{1,3})(?=(?:\^\{?[0-9]\}?)?$)")
_OPERATORS = ("+", "-", "*", "^", "=", "<", ">", "(", "/", ",", "_", ":", "&", "|")


def split_words(text: str) -> tuple[str, Said]:
    """A normalised formula without the words around it, and what these say."""
    return _split_short(text) if len(text) <= CACHED_CHARACTERS else _split(text)


def _split(text: str) -> tuple[str, Said]:
    core, tail = text, ""
    if (money := _MONEY_BEFORE.match(core)) is not None:
        core, tail = money[1] + money[3] + core[money.end() :], CURRENCIES[money[2]]
    if r"\text" in core:
        core = _PER_LETTER.sub(lambda per: rf"/\text{{{per[1]}}}" if per[1] in TYPED_UNITS else per[0], core)
    words: list[str] = []
    for _ in range(8):
        ending = _last_words(core)
        if ending is None or not (rest := ending[0].rstrip()) or rest.endswith(tuple(set(_OPERATORS) - {"/", "*"})):
            break
        piece = ending[1]
        if rest.endswith(("/", "*")):  # `5/\text{s}`
            rest, piece = rest[:-1].rstrip(), rest[-1] + piece
        if not rest or rest.endswith(_OPERATORS):
            break
        core = rest
        words.insert(0, piece)
    wording = re.sub(r"° ([CcFf])\b", r"°\1", " ".join(words).replace(" /", "/"))
    if (number := scaled(core.strip(), wording)) is not None:
        core, wording = number
    if (before := _BEFORE.match(core)) and FUNCTION_WORDS.isdisjoint((before[1] or before[2]).split()):
        core, first = core[before.end() :], (before[1] or before[2]).strip().lower()
        sign = first in ("minus", "negative")
        core, wording = f"-{core}" if sign else core, wording if sign else _with_first(first, wording)
    tail = f"{tail}{'' if wording.startswith('/') else ' '}{wording}".strip()
    return core.strip(), classify(tail) if tail else NOTHING


_split_short = lru_cache(maxsize=1 << 12)(_split)


def _with_first(first: str, wording: str) -> str:
    """The words behind a number with those before it, which are kept apart unless they are a unit (`USD 5`)."""
    unit = classify(first)
    money = unit == NOTHING or (unit.kind in _MONEY and not unit.qualifier)
    return f"{first} {wording}" if money else f"{wording} {first} …"


def _last_words(core: str) -> tuple[str, str] | None:
    """What stands before the last words of a formula, and these."""
    if match := _PERCENT.search(core):
        return core[: match.start()], "%"
    if (match := _DEGREES.search(core)) and not _OF_ANGLE.search(core):
        return core[: match.start()], f"°{match[1] or ''}"
    if match := _MONEY_BEHIND.search(core):
        return core[: match.start()], CURRENCIES[match[1]]
    if r"\text" in core[-200:] and (match := _TYPED.search(core)):
        inner = match[1] if match[1] is not None else match[3]
        if not re.search(r"[0-9](?!\})", re.sub(r"\^\{?-?[0-9]\}?", "", inner)):
            return core[: match.start()], inner.strip() + (f"^{match[2]}" if match[2] else "")
        return None
    if (match := _EACH.search(core)) and _kind(f"/{match[1].lower()}") is not None:
        return core[: match.start()], f"/{match[1]}"
    if core[-1:].isalpha() or core[-1:] in ".}'" or core[-1:].isdigit():
        match = _UNTYPED.search(core)
        if match is not None and _are_words(match["words"], gap=bool(match["gap"])):
            return core[: match.start()], match["words"]
    return None


def _are_words(text: str, *, gap: bool) -> bool:
    """Whether letters without a type behind a number are words, not a product of letters."""
    words = re.findall(r"[A-Za-z]+", text)
    if _kind(text.lower().strip(" .")) is not None and min(map(len, words)) > 1 and (gap or len(words) == 1):
        return True
    if not FUNCTION_WORDS.isdisjoint(words) or {"and", "or"} & {*words}:
        return False
    first = words[0].lower()
    if gap and multiple_of(first):
        return True
    if len(words) == 1 and "^" not in text:
        if unit_name(first, typed=False) and len(first) > 1:
            return True
        return gap and (len(first) > 3 or (len(first) == 3 and singular(first) in COUNTED))
    if "^" in text or "/" in text:
        plain = text.lower().strip()
        single = any(len(word) == 1 for word in words) and not (
            "/" in text and gap and (plain[:3] == "m/s" or len(words[0]) > 1 or len(words[-1]) > 1)
        )
        return not single and _kind(plain) is not None
    return (gap and len(first) > 2) or (len(first) > 1 and unit_name(first, typed=False) is not None)


def unwrapped(text: str) -> str:
    r"""The text with words out of their `\text`."""
    return re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip()

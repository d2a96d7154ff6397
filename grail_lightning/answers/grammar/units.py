"""What follows or precedes a number without changing it: units, currency, percent, degrees, counted things."""

import re
from typing import NamedTuple

from grail_lightning.answers.grammar.functions import ELEMENTARY, TRIGONOMETRIC

__all__ = ["Quantity", "split_quantity"]


# The names of each unit, the first of which stands for all.
_NAMES = (
    "m meter meters metre metres|cm centimeter centimeters centimetre centimetres cms|km kilometer kilometers "
    "kilometre kilometres kms|mm millimeter millimeters millimetre millimetres|in inch inches|ft foot feet|"
    "yd yard yards yds|mi mile miles|s sec secs second seconds|min mins minute minutes|h hr hrs hour hours|day days|"
    "week weeks|month months|year years yr yrs|g gram grams|kg kilogram kilograms kgs|mg milligram milligrams|"
    "lb lbs pound pounds|oz ounce ounces|l liter liters litre litres|ml milliliter milliliters|gallon gallons gal|"
    "dollar dollars usd buck bucks|cent cents|j joule joules|n newton newtons|w watt watts|v volt volts|hz hertz|"
    "mph|kelvin kelvins|rad rads radian radians|unit units"
)
_CANONICAL = {name: names.split()[0] for names in _NAMES.split("|") for name in names.split()}
_MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that make another statement of a number than its bare value.
_STOP_WORDS = (
    "or and not no none never if when where is are was only but either neither minus plus times over more less "
    "than least most about approximately nearly almost around between through except without to so then because "
    "unless some any all many few several with from by mod modulo base choose squared cubed half double twice "
    "wrong false true unknown undefined repeating recurring"
)
_STOP = frozenset(_STOP_WORDS.split())
_OPERATORS = "sqrt pi max min gcd lcm lim det arg mod inf infty"
_FUNCTION_WORDS = frozenset([*ELEMENTARY, *_OPERATORS.split()])

_TEXT_SUFFIX = re.compile(r"\s*\\text\{([^{}]*)\}(?:\s*\^\{?\s*(-?[0-9])\s*\}?)?\s*$")
# `\text{ft}/s`: a single letter loses its `\mathrm` when it is normalised.
_PER = re.compile(r"(?<=\})\s*/\s*([a-zA-Z]{1,3})(?=(?:\^\{?[0-9]\}?)?$)")
_OVER = re.compile(r"\s*/\s*$")
_BARE_SUFFIX = re.compile(
    r"(?P<number>(?:^|[^A-Za-z\\])[0-9.}\)])(?P<space>\s*)(?P<words>[A-Za-z][A-Za-z. ]*)(?:\^\{?(?P<power>[0-9])\}?)?$"
)
_DEGREES = re.compile(r"\s*\^\{?\s*\\circ\s*\}?\s*(?:\\text\{[CF]\}|[CF])?\s*$")
_PERCENT = re.compile(r"\s*(?:%|\\text\{\s*(?:percent|pct)\.?\s*\}|(?<![A-Za-z])(?:percent|pct)\.?)\s*$")
_WORD = re.compile(r"[A-Za-z]+")
# The angle in `\sin 30^\circ` has the degrees, not the answer.
_OF_ANGLE = re.compile(rf"\\(?:{'|'.join(TRIGONOMETRIC)})")


class Quantity(NamedTuple):
    """A formula without what surrounds it.

    Args:
        text: the formula.
        unit: canonical unit such as `cm^2`, `?` for one that is not known, empty without one.
        percent: whether it is said in percent.
        degrees: whether it is said in degrees.
        zeros: power of ten in words (`3 million` has 6).
    """

    text: str
    unit: str = ""
    percent: bool = False
    degrees: bool = False
    zeros: int = 0


def split_quantity(text: str) -> Quantity:
    r"""Take units, currency, percent and degrees off a normalised formula.

    Args:
        text: such as `75\text{square inches}` or `\$42.75`.
    """
    money = re.match(r"([+-]?)\s*\\\$\s*", text)
    bare = re.sub(r"\s*\\\$$", "", money[1] + text[money.end() :] if money else text)
    if r"\text" in bare:
        bare = _PER.sub(lambda per: rf"/\text{{{per[1]}}}" if per[1] in _CANONICAL else per[0], bare)
    quantity = Quantity(bare, unit="dollar" if money else "")
    for _ in range(6):
        shorter = _without_suffix(quantity)
        if shorter is None or not shorter.text or shorter.text[-1] in "+-*^=<>(":
            break
        quantity = shorter
    return quantity


def _without_suffix(quantity: Quantity) -> Quantity | None:
    text = quantity.text
    if percent := _PERCENT.search(text):
        return quantity._replace(text=text[: percent.start()], percent=True)
    if (degrees := _DEGREES.search(text)) and not _OF_ANGLE.search(text):
        return quantity._replace(text=text[: degrees.start()], degrees=True)
    if suffix := _TEXT_SUFFIX.search(text):
        return _with_words(quantity, text[: suffix.start()], suffix[1], suffix[2])
    bare = _BARE_SUFFIX.search(text)
    if bare is None or not _countable(bare["words"], spaced=bool(bare["space"])):
        return None
    return _with_words(quantity, text[: bare.end("number")], bare["words"], bare["power"])


def _countable(words: str, *, spaced: bool) -> bool:
    """Whether bare letters after a number are a unit or a counted thing rather than variables."""
    found = _WORD.findall(words)
    if any(word.lower() in _FUNCTION_WORDS for word in found):
        return False
    known = all(word.lower() in _CANONICAL or word.lower() in _MULTIPLIERS for word in found)
    long = all(len(word) >= 3 for word in found) and spaced
    return bool(found) and ((len("".join(found)) >= 2 and known) or long)


def _with_words(quantity: Quantity, rest: str, words: str, power: str | None) -> Quantity | None:
    found = [word.lower() for word in _WORD.findall(words)]
    if not re.fullmatch(r"[A-Za-z\s./^0-9²³*\\-]*", words) or re.search(r"(?<!\^)[0-9](?!\s*[A-Za-z])", words):
        return None
    if len(found) > 5 or not _STOP.isdisjoint(found) or "percent" in found or "pct" in found:
        return None
    if found in (["degrees"], ["degree"], ["deg"]):
        return quantity._replace(text=rest, degrees=True)
    zeros = quantity.zeros + sum(_MULTIPLIERS.get(word, 0) for word in found)
    slash = _OVER.search(rest)
    unit = _canonical([word for word in found if word not in _MULTIPLIERS], words, power)
    if slash:
        rest, unit = rest[: slash.start()], unit and "/" + unit
    return quantity._replace(text=rest.rstrip(), unit=unit + quantity.unit, zeros=zeros)


def _canonical(found: list[str], words: str, power: str | None) -> str:
    if (half_of_day := "".join(found)) in ("", "am", "pm"):
        return half_of_day
    if found[0] in ("square", "sq", "cubic"):
        power, found = ("3" if found[0] == "cubic" else "2"), found[1:]
    inside = re.search(r"\^\{?([23])\}?", words)
    power = power or (inside[1] if inside else None)
    # One unit, or one over another.
    if len(found) == 1 + words.count("/") < 3 and all(word in _CANONICAL for word in found):
        return "/".join(_CANONICAL[word] for word in found) + (f"^{power}" if power else "")
    return "?"

r"""Statements that are compared as a whole: clock times, dates, congruences, and relations whose sides may be swapped.

`as_named` renames what an answer itself declares: an integer `k\in\mathbb{Z}`, the variable of `f(t)=2t`.
"""

import re
from functools import lru_cache

from grail_lightning.answers.lexicon import MONTHS
from grail_lightning.answers.normalise import string_key
from grail_lightning.answers.quantity import unwrapped

_HALF = r"(?:\s*(?P<half>am|pm|noon|midnight))?"
_CLOCK = re.compile(
    rf"(?P<hour>[0-9]{{1,2}})(?::(?P<minute>[0-5][0-9]))?(?::(?P<second>[0-5][0-9]))?{_HALF}(?:\s*o'clock)?", re.ASCII
)
_MONTH = r"(?P<month>[a-z]{3,9})\.?"
_DAY = r"(?P<day>[0-9]{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?"
_YEAR = r"(?:,? (?P<year>[0-9]{4}))?"
_DATES = [
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"{_WEEKDAY}{_MONTH} {_DAY}{_YEAR}",
        rf"{_WEEKDAY}(?:the )?{_DAY} (?:of )?{_MONTH}{_YEAR}",
        r"(?P<year>[0-9]{4})-(?P<number>[01][0-9])-(?P<day>[0-3][0-9])",
    )
]
_CONGRUENCE = re.compile(
    r"(?:(?P<left>.+?)\\equiv)?\s*(?P<residue>-?[0-9]+)\s*,?\s*\(?\s*\\?(?:text\{\s*\(?)?\s*\\?[bp]?mod\s*\}?\s*\{?\s*(?P<modulus>[0-9]+)\s*\}?\s*\)?\}?",
    re.ASCII,
)
_SYMMETRIC = re.compile(
    r"(?P<left>[^=<>]+?)\s*(?P<sign>\\(?:parallel|perp|cong|sim|simeq)(?![a-z])|\|\|)\s*(?P<right>[^=<>]+)"
)
_SEGMENT = re.compile(r"\\overline\{([A-Z])([A-Z])\}|([A-Z])([A-Z])")


_ANY = re.compile(
    r":|noon|midnight|[0-9]\}?\s?[ap]m|mod|\\(?:parallel|perp|cong|sim)|\|\||[0-9]-|"
    + "|".join(month[:3] for month in MONTHS),
    re.IGNORECASE,
)
Statement = tuple[str, tuple[object, ...]]


@lru_cache(maxsize=1 << 12)
def _statement(text: str) -> Statement | None:
    """The kind of a normalised answer's statement, and what it says; None if it is none of these."""
    if not _ANY.search(text):
        return None
    if (time := _clock(text)) is not None:
        return "time", time
    if (date := _date(text)) is not None:
        return "date", date
    if "mod" in text and (match := _CONGRUENCE.fullmatch(text)) is not None and int(match["modulus"]):
        modulus = int(match["modulus"])
        return "congruence", (string_key(match["left"] or ""), int(match["residue"]) % modulus, modulus)
    sides = _symmetric(text)
    return None if sides is None else ("relation", sides)


def same_statement(gold: str, other: str) -> bool | None:
    """Whether two answers that are times, dates or the like say the same; None if they are something else."""
    first, second = _statement(gold), _statement(other)
    if first is None or second is None or first[0] != second[0]:
        return None
    return _same_time(_clock(gold), _clock(other)) if first[0] == "time" else first[1] == second[1]


_Time = tuple[int, int, int, str]


def _clock(text: str) -> _Time | None:
    if len(text) > 60:
        return None
    match = _CLOCK.fullmatch(unwrapped(text).lower().rstrip("."))
    if match is None and (named := re.fullmatch(r"(?:\\text\{)?\s*(noon|midnight)\s*\}?", text.lower())):
        return 12, 0, 0, "pm" if named[1] == "noon" else "am"
    if match is None or not (match["minute"] or match["half"]) or int(match["hour"]) > 24:
        return None
    hour, half = int(match["hour"]), match["half"] or ""
    if half in ("am", "pm", "noon", "midnight") and not 1 <= hour <= 12:
        return None
    half = {"noon": "pm", "midnight": "am"}.get(half, half)
    return hour, int(match["minute"] or 0), int(match["second"] or 0), half


def _same_time(first: _Time | None, second: _Time | None) -> bool:
    """Without `am` and `pm` a time is one of 24 hours, or the same time as it is written."""
    assert first is not None
    assert second is not None
    if first[:3] == second[:3] and (not first[3] or not second[3]):
        return True
    if first[3] != second[3] and "" in (first[3], second[3]):
        plain = first if not first[3] else second
        if 1 <= plain[0] <= 12:  # `2:30` and `3:30 pm`
            return False
    return _seconds(first) == _seconds(second)


def _seconds(time: _Time) -> int:
    hour, minute, second, half = time
    if half:
        hour = hour % 12 + 12 * (half == "pm")
    return hour * 3600 + minute * 60 + second


def _date(text: str) -> tuple[int, int, int] | None:
    if len(text) > 60 or not re.search("[0-9]", text):
        return None
    plain = unwrapped(text).lower().rstrip(".")
    plain = re.sub(r" ?, ?", ", ", plain)
    for pattern in _DATES:
        match = pattern.fullmatch(plain)
        if match is None:
            continue
        facts = match.groupdict()
        name = facts.get("month")
        months = [
            k
            for k, month in enumerate(MONTHS, 1)
            if name and month.startswith(name.removesuffix("t") if name == "sept" else name)
        ]
        month = int(facts["number"]) if facts.get("number") else months[0] if len(months) == 1 else 0
        if month:
            return int(facts["year"] or 0), month, int(facts["day"])
    return None


def _symmetric(text: str) -> tuple[str, frozenset[str]] | None:
    match = _SYMMETRIC.fullmatch(text)
    if match is None or _SYMMETRIC.search(match["right"]):
        return None
    sides = (string_key(side) for side in (match["left"], match["right"]))
    named = (
        _SEGMENT.sub(lambda ends: "".join(sorted(filter(None, ends.groups()))), side)
        if _SEGMENT.fullmatch(side)
        else side
        for side in sides
    )
    return match["sign"].replace("||", r"\parallel"), frozenset(named)


_DECLARED = re.compile(r"(?<![A-Za-z\\])([a-z])\s*\\in\s*(\\mathbb\{[A-Z]\}(?:[\^_]\{?[+*0-9]\}?)?|\\mathbb [A-Z])")
_VARIABLE = r"(?:[a-z]|\\(?:theta|phi|alpha|beta|omega|tau)(?![a-z]))"
_FUNCTION = re.compile(rf"(?P<head>[A-Za-z]'?)\(\s?(?P<of>{_VARIABLE}\s?(?:,\s?{_VARIABLE}\s?)*)\)\s*=(?!.*=)")
_SEQUENCE = re.compile(r"([A-Za-z])_\{?([i-n])\}?\s*=(?!.*=)")
_INDEX = re.compile(r"\\(?:sum|prod)_\{([a-z])=|\\\{\(?([a-z])(?:\\in[^:|]*?)?(?::|\\mid|\|)|d([a-z])$")
_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")


def as_named(gold: str, other: str) -> str:
    """The answer with each letter that both sides declare in the same way called as in the reference."""
    declared = "\\" in gold and "\\" in other
    if not declared and not any(sign in gold and sign in other for sign in (")=", "_")):
        return other
    pairs = [*zip(_DECLARED.finditer(gold), _DECLARED.finditer(other), strict=False)]
    renames = {theirs[1]: ours[1] for ours, theirs in pairs if ours[2] == theirs[2]}
    ours, theirs = _FUNCTION.match(gold), _FUNCTION.match(other)
    if ours and theirs and ours["head"] == theirs["head"]:
        variables = [[letter.strip() for letter in side["of"].split(",")] for side in (theirs, ours)]
        renames |= zip(*variables, strict=True) if len(variables[0]) == len(variables[1]) else ()
    ours, theirs = _SEQUENCE.match(gold), _SEQUENCE.match(other)
    if ours and theirs and ours[1] == theirs[1]:
        renames[theirs[2]] = ours[2]
    ours, theirs = _INDEX.search(gold), _INDEX.search(other)
    if ours and theirs and ours.lastindex == theirs.lastindex:
        renames[theirs[theirs.lastindex or 0]] = ours[ours.lastindex or 0]
    renames = {old: new for old, new in renames.items() if old != new}
    if not renames or len(set(renames.values())) < len(renames):
        return other
    used = {letter for letter in _LETTER.findall(other) if re.fullmatch(_VARIABLE, letter)}
    if used & {*renames.values()} - renames.keys() or {"e", "d"} & {*renames, *renames.values()}:
        return other
    # A space keeps `\theta` and `\sin` apart from the letter behind it.
    return _LETTER.sub(lambda letter: f" {renames[letter[0]]} " if letter[0] in renames else letter[0], other)

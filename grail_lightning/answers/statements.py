r"""Statements that are compared as a whole: clock times, dates, congruences, and relations whose sides may be swapped.

`as_named` renames what an answer itself declares: an integer `k\in\mathbb{Z}`, the variable of `f(t)=2t`.
"""

import re

from grail_lightning.answers.normalise import TEXT, string_key

_HALF = r"(?:\s*(?P<half>am|pm|noon|midnight))?"
_CLOCK = re.compile(
    rf"(?P<hour>[0-9]{{1,2}})(?::(?P<minute>[0-5][0-9]))?(?::(?P<second>[0-5][0-9]))?{_HALF}(?:\s*o'clock)?", re.ASCII
)
_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905
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
    r"(?P<left>.+?)\\equiv\s*(?P<residue>-?[0-9]+)\s*,?\s*\(?\s*\\?(?:text\{\s*\(?)?\s*\\?p?mod\s*\}?\s*\{?\s*(?P<modulus>[0-9]+)\s*\}?\s*\)?\}?",
    re.ASCII,
)
_SYMMETRIC = re.compile(
    r"(?P<left>[^=<>]+?)\s*(?P<sign>\\(?:parallel|perp|cong|sim|simeq)(?![a-z])|\|\|)\s*(?P<right>[^=<>]+)"
)
_SEGMENT = re.compile(r"\\overline\{([A-Z])([A-Z])\}|([A-Z])([A-Z])")


def same_statement(gold: str, other: str) -> bool | None:
    """Whether two normalised answers that are times, dates or the like say the same; None if they are something else."""
    if ":" in gold + other or ("m" in gold.lower() and "m" in other.lower()):
        times = [_clock(text) for text in (gold, other)]
        if None not in times and ":" in gold + other:
            return _same_time(*times)
    dates = [_date(text) for text in (gold, other)]
    if None not in dates:
        return dates[0] == dates[1]
    if "mod" in gold and "mod" in other:
        found = [_CONGRUENCE.fullmatch(text) for text in (gold, other)]
        if found[0] is not None and found[1] is not None:
            one, two = found[0], found[1]
            modulus = int(one["modulus"])
            same = string_key(one["left"]) == string_key(two["left"]) and modulus == int(two["modulus"]) > 0
            return same and (int(one["residue"]) - int(two["residue"])) % modulus == 0
    sides = [_symmetric(text) for text in (gold, other)]
    return sides[0] == sides[1] if None not in sides else None


def _clock(text: str) -> tuple[int, int, int, str] | None:
    if not re.search("[0-9]", text[:16]) or len(text) > 60:
        return None
    found = _CLOCK.fullmatch(re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip().lower().rstrip("."))
    if found is None or not (found["minute"] or found["half"]) or int(found["hour"]) > 24:
        return None
    hour, half = int(found["hour"]), found["half"] or ""
    if half in ("am", "pm", "noon", "midnight") and not 1 <= hour <= 12:
        return None
    half = {"noon": "pm", "midnight": "am"}.get(half, half)
    return hour, int(found["minute"] or 0), int(found["second"] or 0), half


def _same_time(one: tuple[int, int, int, str], two: tuple[int, int, int, str]) -> bool:
    """Without `am` and `pm` a time is one of 24 hours, or the same time as it is written."""
    if one[:3] == two[:3] and (not one[3] or not two[3]):
        return True
    if one[3] != two[3] and "" in (one[3], two[3]):
        plain = one if not one[3] else two
        if 1 <= plain[0] <= 12:  # `2:30` and `3:30 pm`
            return False
    return _seconds(one) == _seconds(two)


def _seconds(time: tuple[int, int, int, str]) -> int:
    hour, minute, second, half = time
    if half:
        hour = hour % 12 + 12 * (half == "pm")
    return hour * 3600 + minute * 60 + second


def _date(text: str) -> tuple[int, int, int] | None:
    if len(text) > 60 or not re.search("[0-9]", text):
        return None
    plain = re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip().lower().rstrip(".")
    plain = re.sub(r" ?, ?", ", ", plain)
    for pattern in _DATES:
        found = pattern.fullmatch(plain)
        if found is None:
            continue
        facts = found.groupdict()
        name = facts.get("month")
        months = [
            k
            for k, month in enumerate(_MONTHS, 1)
            if name and month.startswith(name.removesuffix("t") if name == "sept" else name)
        ]
        month = int(facts["number"]) if facts.get("number") else months[0] if len(months) == 1 else 0
        if month:
            return int(facts["year"] or 0), month, int(facts["day"])
    return None


def _symmetric(text: str) -> tuple[str, frozenset[str]] | None:
    found = _SYMMETRIC.fullmatch(text)
    if found is None or _SYMMETRIC.search(found["right"]):
        return None
    sides = (string_key(side) for side in (found["left"], found["right"]))
    named = (
        _SEGMENT.sub(lambda ends: "".join(sorted(filter(None, ends.groups()))), side)
        if _SEGMENT.fullmatch(side)
        else side
        for side in sides
    )
    return found["sign"].replace("||", r"\parallel"), frozenset(named)


_DECLARED = re.compile(r"(?<![A-Za-z\\])([a-z])\s*\\in\s*(\\mathbb\{[A-Z]\}(?:[\^_]\{?[+*0-9]\}?)?|\\mathbb [A-Z])")
_FUNCTION = re.compile(r"([A-Za-z]'?)\(([a-z])\)\s*=(?!.*=)")
_LETTER = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]")


def as_named(gold: str, other: str) -> str:
    """The answer with each letter that both sides declare in the same way called as in the reference."""
    pairs = [*zip(_DECLARED.finditer(gold), _DECLARED.finditer(other), strict=False)]
    renames = {theirs[1]: ours[1] for ours, theirs in pairs if ours[2] == theirs[2]}
    ours, theirs = _FUNCTION.match(gold), _FUNCTION.match(other)
    if ours and theirs and ours[1] == theirs[1]:
        renames[theirs[2]] = ours[2]
    renames = {old: new for old, new in renames.items() if old != new}
    if not renames or len(set(renames.values())) < len(renames):
        return other
    used = {letter for letter in _LETTER.findall(other) if len(letter) == 1}
    if used & {*renames.values()} - renames.keys() or {"e", "i"} & renames.keys():
        return other
    return _LETTER.sub(lambda letter: renames.get(letter[0], letter[0]), other)

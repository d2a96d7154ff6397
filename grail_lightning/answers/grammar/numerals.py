r"""Spellings of one number: digits in groups of three, and decimals that repeat.

`grouped` writes `20,000` as `20000` where the comma cannot separate two things; `repeating` writes `0.\bar{3}`,
`0.1\dot{2}\dot{3}`, `0.(3)` and `0.333...` with `\overline`. String work on what `normalise` has rid of its looks.
"""

import re

__all__ = ["grouped", "repeating"]

# Not behind a letter, a script or an index: `a_{1,234}` has two indices.
_COMMAS = re.compile(
    r"(?<![0-9.,_^A-Za-z\\])(?<!_\{)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])(?!\.[0-9]+,[0-9])", re.ASCII
)
# `2 125/250` is a mixed number.
_GAPS = re.compile(
    r"(?<![0-9.,_^A-Za-z\\/}])(?<![0-9]\s)[1-9][0-9]{0,2}(?:\s[0-9]{3})+(?![0-9]|\s?[0-9/]|\s?\\frac|,[0-9])", re.ASCII
)
_BRACKET = re.compile(r"\\[{}]|\\(?:[a-zA-Z]+|.)|[(\[{}\])]", re.DOTALL)
_OPENING, _CLOSING = {"(", "[", "{", r"\{"}, {")", "]", "}", r"\}"}

_MARK = r"\\(?:overline|widebar|overbar|bar|dot)\s*(?:\{\s*[0-9](?:\s*[0-9])*\s*\}|[0-9])"
_MARKS = rf"\s*{_MARK}|\s*\{{(?:\s*{_MARK})+\s*\}}"
# A decimal comma is told from that of a list by the mark behind it.
_MARKED = re.compile(rf"(?<![0-9A-Za-z\\.])([0-9]*)(\.|,|\{{[.,]\}})((?:\s*[0-9])*(?:{_MARKS})(?:\s*[0-9]|{_MARKS})*)")
# Dots and bars that are set over a digit by hand.
_OVERSET = re.compile(r"\\(?:overset|stackrel)\s*\{\s*(?:([.*]|\\bullet)|-)\s*\}\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_GOES_ON = re.compile(r"(\\overline\{[0-9]+\})\s*\\[lc]?dots(?![a-z])")
_PIECE = re.compile(rf"{_MARK}|[0-9]")
# `0.5(3)` is half of three where it is a part of something; alone it is 0.5333…
_PARENTHESES = re.compile(
    r"(?<![0-9A-Za-z\\.)}])([0-9]*)(\.|,(?=\())(?:"
    r"([0-9]+)\(([0-9]+)\)(?=\s*(?:\.?\s*$|[,;)\]}%]|\\(?:%|text|pi|\$)|\^\{?\\circ))|\(([0-9]+)\)(?!\s*[\^!(0-9A-Za-z]))"
)
_DOTS = re.compile(r"(?<![0-9A-Za-z\\.])([0-9]*)\.([0-9]+)\s*(?:\.{3,}|\\[lc]?dots(?![a-z]))(?!\s*[0-9A-Za-z.(])")
# From the last digit on; the shortest block that is seen often enough.
_REPEATS = re.compile(r"([0-9]+?)\1{2,}|([0-9]{2,})\2\Z")


def grouped(text: str) -> str:
    r"""The text with digits in groups of three run together.

    Between braces of a command, and outside of all brackets, a comma without a space before three digits groups them.
    Between brackets it separates, as in `(1,200)` and `\{100,200\}`, unless a group begins with a zero or each member
    is written in groups: `(1,000)`, `(1,250, 3,400)`.

    Args:
        text: an answer in which commands that only change its looks are gone.
    """
    joins = _joins(text) if "," in text else []
    text = _COMMAS.sub(
        lambda found: found[0].replace(",", "") if joins[found.start()] or ",0" in found[0] else found[0], text
    )
    return _GAPS.sub(lambda found: re.sub(r"\s", "", found[0]), text)


def _joins(text: str) -> list[bool]:
    """Of each character whether a comma there may group digits, as the innermost bracket around it has it."""
    opened: list[tuple[int, str]] = []
    spans = []
    for found in _BRACKET.finditer(text):
        if found[0] in _OPENING:
            opened.append((found.end(), found[0]))
        elif found[0] in _CLOSING and opened:
            spans.append((*opened.pop(), found.start()))
    joins = [True] * len(text)
    for start, bracket, stop in sorted(spans):  # the outer ones first
        joins[start:stop] = [bracket == "{" or _all_in_groups(text[start:stop])] * (stop - start)
    return joins


def _all_in_groups(inside: str) -> bool:
    members = [member.strip().lstrip("+-") for member in re.split(r"[,;]\s+", inside)]
    return len(members) > 1 and all(map(_COMMAS.fullmatch, members))


def repeating(text: str) -> str:
    r"""The text with each decimal that repeats as `0.1\overline{6}`.

    Args:
        text: an answer in which commands that only change its looks are gone.
    """
    if not re.search(r"[.,]", text):
        return text
    text = _OVERSET.sub(lambda found: rf"\{'dot' if found[1] else 'bar'}{{{found[2] or found[3]}}}", text)
    text = _MARKED.sub(_marked, text)
    text = _PARENTHESES.sub(_in_parentheses, text)
    return _DOTS.sub(_dotted, _GOES_ON.sub(r"\1", text))


def _spelled(whole: str, start: str, block: str) -> str:
    return rf"{whole or '0'}.{start}\overline{{{block}}}"


def _separates(found: re.Match[str]) -> bool:
    """Whether the comma of a number is one of several in a list."""
    return found[2] == "," and found.string[: found.start()].rstrip().endswith((",", ";"))


def _in_parentheses(found: re.Match[str]) -> str:
    return found[0] if _separates(found) else _spelled(found[1], found[3] or "", found[4] or found[5])


def _marked(found: re.Match[str]) -> str:
    """Bars over the block, or a dot over its first and its last digit; anything else stays as it is."""
    pieces = _PIECE.findall(found[3])
    digits = [re.sub(r"[^0-9]", "", piece) for piece in pieces]
    marks = [place for place, piece in enumerate(pieces) if piece.startswith("\\")]
    if not marks or marks[-1] != len(pieces) - 1 or _separates(found):
        return found[0]
    dots = [place for place in marks if pieces[place].startswith(r"\dot")]
    together = marks == list(range(marks[0], len(pieces)))
    if (dots and dots != marks) or not (together or len(dots) == 2):
        return found[0]
    return _spelled(found[1], "".join(digits[: marks[0]]), "".join(digits[marks[0] :]))


def _dotted(found: re.Match[str]) -> str:
    """`0.333...` and `0.1666...`: the block must be seen three times, or twice and nothing else; `3.14...` goes on."""
    digits = found[2]
    repeats = _REPEATS.match(digits[::-1])
    if repeats is None:
        return rf"{found[1]}.{digits}\ldots "
    block = (repeats[1] or repeats[2])[::-1]
    return _spelled(found[1], digits[: len(digits) - len(repeats[0])], block)

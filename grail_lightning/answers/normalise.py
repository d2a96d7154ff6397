r"""One spelling for one thing: what two typesetters write differently becomes the same string.

Pure string work, linear or nearly so on text within the caps. The output is still LaTeX: `\frac{1}{2}`,
`\sqrt{2}`, `\le`, `\{1,2\}`; words stay in `\text{...}`. Nothing here decides whether two answers are equal.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator
from functools import lru_cache

from grail_lightning.answers import spellings
from grail_lightning.answers.find import last_box
from grail_lightning.answers.spellings import grouped, repeating

__all__ = [
    "CLOSING",
    "TEXT",
    "balanced",
    "group_end",
    "normalise",
    "pieces",
    "split",
    "string_key",
    "text_key",
]


# Words in upright type, and what else `\text` holds.
TEXT = re.compile(r"\\text\{([^{}]*)\}")
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"])
_PIECE = re.compile(r"\\text\{[^{}]*\}|\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
_COMMAND_OR_BRACKET = re.compile(r"\\(?:[a-zA-Z]+|.)|[{}()\[\]]", re.DOTALL)


def balanced(text: str) -> bool:
    r"""Whether braces nest, and the other brackets are as many open as closed (kinds may mix: `[0,1)`)."""
    depths = {True: 0, False: 0}  # of braces, and of the others
    for piece in _COMMAND_OR_BRACKET.findall(text):
        depths[piece in ("{", "}")] += (piece in _OPENING) - (piece in CLOSING)
        if min(depths.values()) < 0:
            return False
    return not any(depths.values())


def group_end(text: str, start: int) -> int:
    """Index after the brace that closes the one at `start`; -1 if none does."""
    depth = 0
    for found in _COMMAND_OR_BRACKET.finditer(text, start):
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return found.end()
    return -1


def pieces(text: str) -> Iterator[tuple[int, str, int]]:
    r"""Tokens of a text with their place and the depth of brackets around them; `\text{...}` is one token."""
    depth = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        depth -= piece in CLOSING or piece.startswith(r"\end{")
        yield found.start(), piece, depth
        depth += piece in _OPENING or piece.startswith(r"\begin{")


def split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """Parts of a text between separators outside of all brackets, and the separators."""
    parts, found, start = [], [], 0
    for place, piece, depth in pieces(text):
        if depth == 0 and piece in separators:
            parts.append(text[start:place])
            found.append(piece)
            start = place + len(piece)
    return [*parts, text[start:]], found


# Answers come again when they are short; what is kept of long ones would be a model's to grow.
CACHED_CHARACTERS = 128

_RAISED = re.compile(f"[{''.join(map(chr, spellings.SUPER))}]+")
_LOWERED = re.compile(f"[{''.join(map(chr, spellings.SUB))}]+")
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_LEAD = re.compile(
    r"^\s*(?:(?:the\s+)?(?:final\s+)?(?:answer|solution|result)s?(?:\s+(?:is|are))?\s*[:=]?|\\approx|\\text\{\s*(?:(?:the\s+)?"
    r"(?:final\s+)?(?:answer|solution|result)s?(?:\s+(?:is|are))?\s*[:=]?\s*)\}\s*:?|=|:)(?=[\s\\(\[\d.+\-$a-zA-Z])",
    re.IGNORECASE,
)
# Up to a verb that ends the upright type or, for the phrase that all use, that stands inside of it.
_INTRODUCTION = re.compile(
    r"\\text\{\s*(?:(?P<inside>(?:the\s+)?(?:final\s+)?(?:answer|solution|result)s?\s+(?:is|are)\s*[:,]?\s(?=[^\s}]))"
    r"|(?:(?:so|thus|hence|therefore|then|finally)\s*,?|[A-Za-z][A-Za-z ,']*?(?:\s(?:is|are|equals|equal to)|\s*:)"
    r"|the\s+(?:line|circle|parabola|ellipse|hyperbola|plane|curve|equation|function|interval|set|point|value))"
    r"\s*:?\s*\}\s*(?=\S)|(?:for\s+)?all\s*\}\s*(?=[A-Za-z]\s*(?:[<>]|\\(?:[lg]e|ne|in)(?![a-zA-Z]))))",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\b(?:not?|never|nor|neither|cannot|false|wrong|unless|if|whether)\b|n't", re.IGNORECASE)
# `1{,}000`, `1,\!000`, `1\,000`, `1\ 000`: separators that are no list commas.
_SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|,?\\,|\\[ :;>]|~)\s*(?=\d{3}(?!\d))")
_BARRED = re.compile("((?:[0-9][\u0304\u0305])+)")
_DOTTED = re.compile("([0-9])\u0307")
_GOES_ON = re.compile(r"(?<=[,+*<=-])\s*\.{3,}")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]e|[lg]eq|neq?|in|approx)(?![a-zA-Z])")
_CONTINUED = re.compile(
    r"^(?:[-+*/=<>&]|\\(?:cdot|times|[lg]eq?|neq?|in|approx)(?![a-zA-Z]))|(?:[-+*/=<>:&]|\\\\|\\(?:cdot|times|[lg]eq?|neq?|in|approx|quad)|(?<![\\A-Za-z])[A-Za-z]{2,})$"
)
_TOKEN = re.compile(r"\s*([A-Za-z0-9]|\\[A-Za-z]+)")
_OPENING_OF_TEXT = re.compile(r"\s*\{")
_PLAIN_LIST = re.compile(r"[0-9,.\s+-]+,\s+[0-9,.\s+-]+", re.ASCII)
# Units that would pass for a function or a quotient of letters.
_UNIT = re.compile(r"min|[A-Za-z]{1,3}\s?/\s?[A-Za-z]{1,3}(?:\^\{?[23]\}?)?")
# What separates the members of a list in words.
_LISTED = re.compile(r"(,(?!\d)|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))", re.IGNORECASE)
_TRAILING = re.compile(r"(?:[.,;]|\\\\|\\text\{\s*[.,]?\s*\})\s*$")


def normalise(text: str) -> str:
    """The answer in one spelling."""
    return _of_short(text) if len(text) <= CACHED_CHARACTERS else _normalised(text)


def _normalised(text: str) -> str:
    text = _unbox(text.strip())
    text = _SEPARATED.sub("", _unicode(text))
    text = _lines(_delimiters(text))
    text = repeating(grouped(_commands(text)))
    if _PLAIN_LIST.fullmatch(text):  # `48, 210` are two numbers, `48,210` is one
        text = re.sub(r",\s+", ";", text)
    text = _spaces(text)
    text = _trailing(text)
    text = _trailing(_spaces(_LEAD.sub("", _introduced(text))))
    # A function of nothing is a word.
    return rf"\text{{{text[1:]}}}" if text[:1] == "\\" and text[1:] in spellings.WRAPPED_FUNCTIONS else text


def _introduced(text: str) -> str:
    r"""The text without a phrase in upright type that introduces an answer: `\text{The area is }12`."""
    if (phrase := _INTRODUCTION.match(text)) is None or _DENIAL.search(phrase[0]):
        return text
    return rf"\text{{{text[phrase.end() :]}" if phrase["inside"] else text[phrase.end() :]


_of_short = lru_cache(maxsize=1 << 12)(_normalised)


def _unbox(text: str) -> str:
    while (box := last_box(text)) is not None and box.start == 0 and box.stop == len(text):
        text = text[box.content_start : box.content_stop].strip()
    while text.startswith("{") and group_end(text, 0) == len(text):
        text = text[1:-1].strip()
    return text


def _lines(text: str) -> str:
    """Relations on lines of their own are a list; other line breaks are spaces."""
    if "\n" not in text:
        return text
    lines = [line.strip().removesuffix(r"\\").strip().rstrip(",;") for line in text.split("\n") if line.strip()]
    whole = all(balanced(line) and line.count(r"\begin") == line.count(r"\end") for line in lines)
    if whole and all(_RELATION.search(line) and not _CONTINUED.search(line) for line in lines):
        return ";".join(lines)
    return text


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _BARRED.sub(lambda run: rf"\overline{{{re.sub('[^0-9]', '', run[0])}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text)
    text = _RAISED.sub(lambda run: "^{" + run[0].translate(spellings.SUPER) + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + run[0].translate(spellings.SUB) + "}", text)
    return "".join(map(_compatible, text.translate(spellings.SYMBOLS)))


def _compatible(character: str) -> str:
    form = unicodedata.normalize("NFKC", character)
    upper, slash, lower = form.partition("\u2044")  # one half is a single character
    return rf"\frac{{{upper}}}{{{lower}}}" if slash and lower else form


def _delimiters(text: str) -> str:
    text = re.sub(r"\\\(|\\\)|\\\[(?![\d.]+(?:pt|em|ex|mm|cm)\])|(?<!\\)\\\]", " ", text)
    text = _GOES_ON.sub(r"\\ldots ", text.replace(r"\text{\$}", r"\$"))
    # A dollar is money or a delimiter; neither changes the number. `\$` marks money for the unit rules.
    return re.sub(r"(?<!\\)\$", " ", text)


def _commands(text: str) -> str:
    written: list[str] = []
    place = 0
    while (command := _COMMAND.search(text, place)) is not None:
        written.append(text[place : command.start()])
        place = command.end()
        name = command[1]
        if name in spellings.LOOKS:
            if name in ("left", "right", "middle") and text.startswith(".", place):
                place += 1
            written.append(" " if name.isalpha() and text[place : place + 1].isalnum() else "")
        elif name in spellings.SPACES:
            written.append(" ")
        elif name in spellings.UPRIGHT:
            place = _upright(text, place, name, written)
        elif name in spellings.WRAPPERS:
            place = _wrapped(text, place, name, written)
        else:
            written.append(spellings.COMMANDS.get(name, "\\" + name))
    written.append(text[place:])
    return "".join(written).replace("~", " ").replace("!=", r"\ne ").replace("<=", r"\le ").replace(">=", r"\ge ")


def _argument(text: str, place: int) -> tuple[str, int] | None:
    """The brace group at or after `place` (spaces skipped), without its braces, and the index after it."""
    opening = _OPENING_OF_TEXT.match(text, place)
    if opening is None or (end := group_end(text, opening.end() - 1)) < 0:
        return None
    return text[opening.end() : end - 1], end


def _wrapped(text: str, place: int, name: str, written: list[str]) -> int:
    found = _argument(text, place)
    if found is None and name in spellings.ACCENTS and (token := _TOKEN.match(text, place)):
        found = token[1], token.end()
    if found is None:
        return place
    if name in spellings.ACCENTS:
        written.append(rf"\{name}{{{found[0]}}}")
    elif name in spellings.TRANSPARENT:
        written.append("{" + _commands(found[0]) + "}")
    return found[1]


def _upright(text: str, place: int, name: str, written: list[str]) -> int:
    found = _argument(text, place + text.startswith("*", place))
    if found is None:
        return place
    inner = re.sub(r"\s+", " ", TEXT.sub(r"\1", _commands(found[0])))
    word = spellings.TEXT_SYNONYMS.get(inner.strip(), inner.strip())
    unit = name in spellings.TEXT and (word in spellings.UNIT_LETTERS or _UNIT.fullmatch(word))
    if unit and re.search(r"[0-9})]\s*$", written[-1] if written else ""):
        written.append(rf"\text{{{word}}}")
    elif word in spellings.WRAPPED_FUNCTIONS:
        written.append(rf"\{word} ")
    elif len(word) == 1 or not _has_word(word):
        written.append(f" {word} " if word else " ")
    elif re.fullmatch(r"\(\s*[A-Za-z]\s*\)", word):
        written.append(word)
    elif _LISTED.search(inner):  # `\text{red, blue and 3}` is `\text{red},\text{blue}\text{and}3`
        written += [rf"\text{{{piece}}}" if _has_word(piece) else f" {piece} " for piece in _LISTED.split(inner)]
    else:
        written.append(rf"\text{{{inner}}}")
    return found[1]


def _has_word(text: str) -> bool:
    """Whether a text has two letters side by side, or an abbreviation, beside its commands."""
    return re.search(r"[A-Za-z]{2}|[A-Za-z]\.", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _spaces(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    # A space stays where it keeps a command from its letter, a word from its neighbour and a number from the next.
    text = re.sub(r"(?<![A-Za-z0-9.}])\s|\s(?![A-Za-z0-9.\\{(])", "", text)
    return re.sub(r"(?<=\d)\s(?=\\(?!text|frac))|(?<=\})\s(?=[\\{(])", "", text)


def _trailing(text: str) -> str:
    while (end := _TRAILING.search(text)) is not None and not text.endswith(r"\,"):
        text = text[: end.start()].rstrip()
    return text


def string_key(text: str) -> str:
    r"""For string equality: `{x}` is `x`, and only the space between two digits tells anything."""
    text = re.sub(r"\{([A-Za-z0-9])\}", r"\1", text)
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def text_key(text: str, *, ignore_case: bool) -> str:
    """For equality of plain text: Unicode's compatible forms and runs of white space are the same."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split())
    return plain.casefold() if ignore_case else plain

r"""One spelling for one thing: what two typesetters write differently becomes the same string.

Pure string work, linear or nearly so on text that `capped` lets through. The output is still LaTeX: `\frac{1}{2}`,
`\sqrt{2}`, `\le`, `\{1,2\}`; words stay in `\text{...}`. Nothing here decides whether two answers are equal.
"""

import re
import unicodedata
from functools import lru_cache

from grail_lightning.answers.find.boxes import last_box
from grail_lightning.answers.grammar.brackets import balanced, group_end
from grail_lightning.answers.grammar.numerals import grouped, repeating
from grail_lightning.answers.grammar.spellings import (
    COMMANDS,
    LOOKS,
    SPACES,
    SUB,
    SUPER,
    SYMBOLS,
    TEXT,
    TEXT_SYNONYMS,
    TRANSPARENT,
    UNIT_LETTERS,
    UPRIGHT,
    WRAPPED_FUNCTIONS,
)

__all__ = ["capped", "normalise", "string_key"]

# Answers come again when they are short; what is kept of long ones would be a model's to grow.
CACHED_CHARACTERS = 128

_RAISED = re.compile(f"[{''.join(SUPER)}]+")
_LOWERED = re.compile(f"[{''.join(SUB)}]+")
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_LEAD = re.compile(
    r"^\s*(?:(?:the\s+)?(?:final\s+)?(?:answer|solution|result)s?(?:\s+(?:is|are))?\s*[:=]?|\\approx|\\text\{\s*(?:(?:the\s+)?"
    r"(?:final\s+)?(?:answer|solution|result)s?(?:\s+(?:is|are))?\s*[:=]?\s*)\}\s*:?|=|:)(?=[\s\\(\[\d.+\-$a-zA-Z])",
    re.IGNORECASE,
)
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
_DIGITS = re.compile(r"\d+")
_EXPONENT = re.compile(r"[eE][+-]?0*(\d{4,})")
_PLAIN_LIST = re.compile(r"[0-9,.\s+-]+,\s+[0-9,.\s+-]+", re.ASCII)
# Units that would pass for a function or a quotient of letters.
_UNIT = re.compile(r"min|[A-Za-z]{1,3}\s?/\s?[A-Za-z]{1,3}(?:\^\{?[23]\}?)?")
# What separates the members of a list in words.
_LISTED = re.compile(r"(,(?!\d)|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))", re.IGNORECASE)
_TRAILING = re.compile(r"(?:[.,;]|\\\\|\\text\{\s*[.,]?\s*\})\s*$")


def capped(text: str, max_characters: int, max_nesting: int, max_digits: int) -> bool:
    """Whether a text is too large in one way or another for anything that parses.

    Args:
        text: an answer.
        max_characters: longest text.
        max_nesting: deepest brackets, all kinds together.
        max_digits: longest run of digits.
    """
    if len(text) > max_characters or "\0" in text:
        return True
    if any(len(run) > max_digits for run in _DIGITS.findall(text)) or _EXPONENT.search(text):
        return True
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > max_nesting:
            return True
    return False


def normalise(text: str) -> str:
    """The answer in one spelling.

    Args:
        text: a bare answer within the caps.
    """
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
    text = _trailing(_spaces(_LEAD.sub("", text)))
    # A function of nothing is a word.
    return rf"\text{{{text[1:]}}}" if text[:1] == "\\" and text[1:] in WRAPPED_FUNCTIONS else text


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
    lines = [line.strip().rstrip(",;") for line in text.split("\n") if line.strip()]
    whole = all(balanced(line) and line.count(r"\begin") == line.count(r"\end") for line in lines)
    if whole and all(_RELATION.search(line) and not _CONTINUED.search(line) for line in lines):
        return ";".join(lines)
    return text


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _BARRED.sub(lambda run: rf"\overline{{{re.sub('[^0-9]', '', run[0])}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text)
    text = _RAISED.sub(lambda run: "^{" + "".join(map(SUPER.__getitem__, run[0])) + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + "".join(map(SUB.__getitem__, run[0])) + "}", text)
    return "".join(SYMBOLS.get(character) or _compatible(character) for character in text)


def _compatible(character: str) -> str:
    if character in SYMBOLS:
        return ""
    form = unicodedata.normalize("NFKC", character)
    upper, slash, lower = form.partition("\u2044")  # one half is a single character
    return rf"\frac{{{upper}}}{{{lower}}}" if slash and lower else form


def _delimiters(text: str) -> str:
    text = re.sub(r"\\\(|\\\)|\\\[(?!\d+pt)|(?<!\\)\\\]", " ", text)
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
        if name in LOOKS:
            if name in ("left", "right", "middle") and text.startswith(".", place):
                place += 1
            written.append(" " if name.isalpha() and text[place : place + 1].isalnum() else "")
        elif name == "!":
            pass
        elif name in SPACES:
            written.append(" ")
        elif name in UPRIGHT:
            place = _upright(text, place, name, written)
        elif name in TRANSPARENT or name in ("color", "textcolor", "phantom", "hspace", "tag", "label"):
            place = _transparent(text, place, name, written)
        else:
            written.append(COMMANDS.get(name, "\\" + name))
    written.append(text[place:])
    return "".join(written).replace("~", " ").replace("!=", r"\ne ").replace("<=", r"\le ").replace(">=", r"\ge ")


def _argument(text: str, place: int) -> tuple[str, int] | None:
    """The brace group at or after `place` (spaces skipped), without its braces, and the index after it."""
    start = place + len(text[place:]) - len(text[place:].lstrip())
    if not text.startswith("{", start) or (end := group_end(text, start)) < 0:
        return None
    return text[start + 1 : end - 1], end


def _transparent(text: str, place: int, name: str, written: list[str]) -> int:
    found = _argument(text, place)
    if found is None and name in ("bar", "hat", "vec") and (token := _TOKEN.match(text, place)):
        found = token[1], token.end()
    if found is None:
        return place
    content, end = found
    if name in TRANSPARENT:
        written.append(
            "{" + _commands(content) + "}" if name not in ("bar", "hat", "vec") else rf"\{name}{{{content}}}"
        )
    return end


def _upright(text: str, place: int, name: str, written: list[str]) -> int:
    if text.startswith("*", place):
        place += 1
    found = _argument(text, place)
    if found is None:
        return place
    content, end = found
    inner = re.sub(r"\s+", " ", re.sub(r"\\text\{([^{}]*)\}", r"\1", _commands(content)))
    word = inner.strip()
    word = TEXT_SYNONYMS.get(word, word)
    if (
        name in TEXT
        and (word in UNIT_LETTERS or _UNIT.fullmatch(word))
        and re.search(r"[0-9})]\s*$", written[-1] if written else "")
    ):
        written.append(rf"\text{{{word}}}")
    elif word in WRAPPED_FUNCTIONS:
        written.append(rf"\{word} ")
    elif len(word) == 1 or not re.search(r"[A-Za-z]{2}|[A-Za-z]\.", re.sub(r"\\[A-Za-z]+", "", word)):
        written.append(f" {word} " if word else " ")
    elif re.fullmatch(r"\(\s*[A-Za-z]\s*\)", word):
        written.append(word)
    elif _LISTED.search(inner):
        written.append(_listed(inner))
    else:
        written.append(rf"\text{{{inner}}}")
    return end


def _listed(inner: str) -> str:
    r"""`\text{red, blue and 3}` as `\text{red},\text{blue}\text{and}3`: each member as if it stood alone."""
    written = []
    for piece in _LISTED.split(inner):
        if re.search(r"[A-Za-z]{2}|[A-Za-z]\.", re.sub(r"\\[A-Za-z]+", "", piece)):
            written.append(rf"\text{{{piece}}}")
        else:
            written.append(f" {piece} ")
    return "".join(written)


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

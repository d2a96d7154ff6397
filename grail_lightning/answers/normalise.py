r"""One spelling for one thing: what two typesetters write differently becomes the same string.

Pure string work, linear or nearly so on text within the caps. The output is still LaTeX: `\frac{1}{2}`, `\sqrt{2}`,
`\le`, `\{1,2\}`; words stay in `\text{...}`. Nothing here decides whether two answers are equal.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator
from functools import lru_cache

from grail_lightning.answers.find import last_box

# ruff: noqa: RUF001 (these are tables of letters that look alike)

TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
INVERSE = {name: f"arc{name}" for name in TRIGONOMETRIC}
HYPERBOLIC = ("sinh", "cosh", "tanh")
LOGARITHMS = ("ln", "log")
# A text in which one of these stands is a formula, not a unit or a name.
ELEMENTARY = (*TRIGONOMETRIC, *LOGARITHMS, "exp")
FUNCTIONS = frozenset([*ELEMENTARY, *INVERSE.values(), *HYPERBOLIC])
# Constants that are written as words, too.
BARE_WORDS = {"pi": "pi", "infinity": "inf", "infty": "inf", "inf": "inf", "oo": "inf"}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_GREEK_LETTERS = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK_NAMES.split(), strict=True))
GREEK = frozenset(_GREEK_LETTERS.values()) - {"pi"}  # those that are no number

# Characters with the command of each.
_NAMED = "∞infty √sqrt ≤le ⩽le ≥ge ⩾ge ≠ne ±pm ∓mp ∪cup ∩cap ∅emptyset ∈in ≈approx ∠angle ∖setminus …ldots"
_SYMBOLS = str.maketrans(
    {letter: rf"\{name} " for letter, name in _GREEK_LETTERS.items()}
    | {named[0]: rf"\{named[1:]} " for named in _NAMED.split()}
    | {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
    | dict.fromkeys("−–—‒﹣－", "-")
    | dict.fromkeys("⋅·∙•×✕∗", "*")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("′’‘", "'")
    | dict.fromkeys("“”", '"')
    | dict.fromkeys("°º", r"^\circ ")
    | dict.fromkeys("£€¥", r"\$")
    | {"∣": "|", "￠": "", "％": "%", "\u200b": "", "\ufeff": ""}
)
_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_SAME = {
    r"\frac": "dfrac tfrac cfrac",
    r"\binom": "dbinom tbinom",
    r"\le ": "leq leqslant leqq",
    r"\ge ": "geq geqslant geqq",
    r"\ne ": "neq not=",
    "*": "cdot times ast bullet",
    "|": "lvert rvert vert mvert",
    r"\emptyset ": "varnothing",
    r"^\circ ": "degree degrees",
    **{"/": "div", "<": "lt", ">": "gt", r"\{": "lbrace", r"\}": "rbrace", "[": "lbrack", "]": "rbrack", "%": "%"},
    **{r"\epsilon ": "varepsilon", r"\theta ": "vartheta", r"\phi ": "varphi", r"\ldots ": "dots"},
}
_COMMANDS = {name: spelling for spelling, names in _SAME.items() for name in names.split()}
# Commands that change how something looks, not what it is.
_LOOKS_NAMES = (
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits rm bf it large "
    "Large boldsymbol bm !"
)
_LOOKS = frozenset(_LOOKS_NAMES.split())
_SPACES = frozenset([",", ";", ":", ">", "quad", "qquad", " ", "\n"])
# Wrappers of upright or bold type: a number, a symbol or a formula inside stands for itself, a word is a word.
_PLAIN = ("text", "textrm", "textnormal", "mathrm", "mbox", "hbox")
_UPRIGHT = (*_PLAIN, "textbf", "textit", "textsf", "mathbf", "mathit", "mathsf", "operatorname", "emph", "textsc")
_ACCENTS = ("bar", "hat", "vec")
_TRANSPARENT = ("underline", "boxed", "fbox")
# With those whose argument is nothing that is read.
_WRAPPERS = (*_ACCENTS, *_TRANSPARENT, "color", "textcolor", "phantom", "hspace", "tag", "label")
_WRAPPED_FUNCTIONS = FUNCTIONS | {"max", "min", "gcd", "lcm", "det"}

# Words in upright type, and what else `\text` holds.
TEXT = re.compile(r"\\text\{([^{}]*)\}")
_OPENING = frozenset(["(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"])
_PIECE = re.compile(r"\\text\{[^{}]*\}|\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
_COMMAND_OR_BRACKET = re.compile(r"\\(?:[a-zA-Z]+|.)|[{}()\[\]]", re.DOTALL)
# Answers come again when they are short; what is kept of long ones would be a model's to grow.
CACHED_CHARACTERS = 128

_RAISED = re.compile(f"[{''.join(map(chr, _SUPER))}]+")
_LOWERED = re.compile(f"[{''.join(map(chr, _SUB))}]+")
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_RESULT = r"(?:the\s+)?(?:final\s+)?(?:answer|solution|result)s?"
_LEAD = re.compile(
    rf"^\s*(?:{_RESULT}(?:\s+(?:is|are))?\s*[:=]?|\\approx|=|:)(?=[\s\\(\[\d.+\-$a-zA-Z])", re.IGNORECASE
)
# Up to a verb that ends the upright type or, for the phrase that all use, that stands inside of it.
_INTRODUCTION = re.compile(
    rf"\\text\{{\s*(?:(?P<inside>{_RESULT}\s+(?:is|are)\s*[:,]?\s(?=[^\s}}]))"
    r"|(?:(?:so|thus|hence|therefore)\s*,?|[A-Za-z][A-Za-z ,']*?(?:\s(?:is|are|equals|equal to)|\s*:))"
    r"\s*:?\s*\}\s*(?=\S))",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"\b(?:not?|never|nor|neither|cannot|false|wrong|unless|if|whether)\b|n't", re.IGNORECASE)
# `1{,}000`, `1,\!000`, `1\,000`, `1\ 000`: separators that are no list commas.
_SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|,?\\,|\\[ :;>]|~)\s*(?=\d{3}(?!\d))")
_GOES_ON = re.compile(r"(?<=[,+*<=-])\s*\.{3,}")
_TOKEN = re.compile(r"\s*([A-Za-z0-9]|\\[A-Za-z]+)")
_OPENING_OF_TEXT = re.compile(r"\s*\{")
# Units that would pass for a function, a letter or a quotient of letters.
_UNIT = re.compile(r"min|[mgsLlJNWVAKChFPT]|[A-Za-z]{1,3}\s?/\s?[A-Za-z]{1,3}(?:\^\{?[23]\}?)?")
# What separates the members of a list in words.
_LISTED = re.compile(r"(,(?!\d)|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))", re.IGNORECASE)
_TRAILING = re.compile(r"(?:[.,;]|\\\\)\s*$")

# Digits in groups of three. Not behind a letter, a script or an index: `a_{1,234}` has two indices.
_GROUPED = re.compile(
    r"(?<![0-9.,_^A-Za-z\\])(?<!_\{)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])(?!\.[0-9]+,[0-9])", re.ASCII
)
# `\bar 3`, `\overline{3}`, and a dot over the first and the last digit of the block that repeats.
_BAR = re.compile(r"\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_DOTTED_BLOCK = re.compile(r"\\dot\s*\{?\s*([0-9])\}?(?:([0-9]*)\\dot\s*\{?\s*([0-9])\}?)?")
_BARS_SIDE_BY_SIDE = re.compile(r"(\\overline\{[0-9]+)\}\s*\\overline\{([0-9]+\})")
# A decimal comma is told from that of a list by the bar behind it.
_BEFORE_BAR = re.compile(
    r"(?<![0-9A-Za-z\\.,;])([0-9]*)(?:[.,]|\{[.,]\})([0-9]*)(?:\{\\overline\{([0-9]+)\}\}|\\overline\{([0-9]+)\})"
)
_BAR_AND_DOTS = re.compile(r"(\\overline\{[0-9]+\})\s*(?:\.{3,}|\\[lc]?dots(?![a-z]))")
# `0.5(3)` is half of three where it is a part of something; alone it is 0.5333…
_PARENTHESES = re.compile(
    r"(?<![0-9A-Za-z\\.)}])([0-9]*)(?:\.|,(?=\())(?:"
    r"([0-9]+)\(([0-9]+)\)(?=\s*(?:$|[,;)\]}%]|\\(?:%|text|pi)))|\(([0-9]+)\)(?!\s*[\^!(0-9A-Za-z]))"
)
_DOTS = re.compile(r"(?<![0-9A-Za-z\\.])([0-9]*)\.([0-9]+)\s*(?:\.{3,}|\\[lc]?dots(?![a-z]))(?!\s*[0-9A-Za-z.(])")
# From the last digit on; the shortest block that is seen often enough.
_REPEATS = re.compile(r"([0-9]+?)\1{2,}|([0-9]{2,})\2\Z")


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
    parts, between, start = [], [], 0
    for place, piece, depth in pieces(text):
        if depth == 0 and piece in separators:
            parts.append(text[start:place])
            between.append(piece)
            start = place + len(piece)
    return [*parts, text[start:]], between


def normalise(text: str) -> str:
    """The answer in one spelling."""
    return _of_short(text) if len(text) <= CACHED_CHARACTERS else _normalised(text)


def _normalised(text: str) -> str:
    text = text.strip()
    while (box := last_box(text)) is not None and box.start == 0 and box.stop == len(text):
        text = text[box.content_start : box.content_stop].strip()
    text = _SEPARATED.sub("", _unicode(text))
    text = _repeating(_grouped(_commands(_delimiters(text))))
    text = _trailing(_spaces(text))
    if (phrase := _INTRODUCTION.match(text)) is not None and not _DENIAL.search(phrase[0]):
        text = rf"\text{{{text[phrase.end() :]}" if phrase["inside"] else text[phrase.end() :]
    text = _trailing(_spaces(_LEAD.sub("", text)))
    # A function of nothing is a word.
    return rf"\text{{{text[1:]}}}" if text[:1] == "\\" and text[1:] in _WRAPPED_FUNCTIONS else text


_of_short = lru_cache(maxsize=1 << 12)(_normalised)


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda run: "^{" + run[0].translate(_SUPER) + "}", text)
    text = _LOWERED.sub(lambda run: "_{" + run[0].translate(_SUB) + "}", text)
    return "".join(map(_compatible, text.translate(_SYMBOLS)))


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
        if name in _LOOKS:
            if name in ("left", "right", "middle") and text.startswith(".", place):
                place += 1
            written.append(" " if name.isalpha() and text[place : place + 1].isalnum() else "")
        elif name in _SPACES:
            written.append(" ")
        elif name in _UPRIGHT:
            place = _upright(text, place, name, written)
        elif name in _WRAPPERS:
            place = _wrapped(text, place, name, written)
        else:
            written.append(_COMMANDS.get(name, "\\" + name))
    written.append(text[place:])
    return "".join(written).replace("~", " ").replace("!=", r"\ne ").replace("<=", r"\le ").replace(">=", r"\ge ")


def _argument(text: str, place: int) -> tuple[str, int] | None:
    """The brace group at or after `place` (spaces skipped), without its braces, and the index after it."""
    opening = _OPENING_OF_TEXT.match(text, place)
    if opening is None or (end := group_end(text, opening.end() - 1)) < 0:
        return None
    return text[opening.end() : end - 1], end


def _wrapped(text: str, place: int, name: str, written: list[str]) -> int:
    argument = _argument(text, place)
    if argument is None and name in _ACCENTS and (token := _TOKEN.match(text, place)):
        argument = token[1], token.end()
    if argument is None:
        return place
    if name in _ACCENTS:
        written.append(rf"\{name}{{{argument[0]}}}")
    elif name in _TRANSPARENT:
        written.append("{" + _commands(argument[0]) + "}")
    return argument[1]


def _upright(text: str, place: int, name: str, written: list[str]) -> int:
    argument = _argument(text, place + text.startswith("*", place))
    if argument is None:
        return place
    inner = re.sub(r"\s+", " ", TEXT.sub(r"\1", _commands(argument[0])))
    word = inner.strip()
    if name in _PLAIN and _UNIT.fullmatch(word) and re.search(r"[0-9})]\s*$", written[-1] if written else ""):
        written.append(rf"\text{{{word}}}")
    elif word in _WRAPPED_FUNCTIONS:
        written.append(rf"\{word} ")
    elif not _has_word(word):
        written.append(f" {word} " if word else " ")
    elif _LISTED.search(inner):  # `\text{red, blue and 3}` is `\text{red},\text{blue}\text{and}3`
        written += [rf"\text{{{piece}}}" if _has_word(piece) else f" {piece} " for piece in _LISTED.split(inner)]
    else:
        written.append(rf"\text{{{inner}}}")
    return argument[1]


def _has_word(text: str) -> bool:
    """Whether a text has two letters side by side, or an abbreviation, beside its commands."""
    return re.search(r"[A-Za-z]{2}|[A-Za-z]\.", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _grouped(text: str) -> str:
    r"""The text with digits in groups of three run together.

    Between braces of a command, and outside of all brackets, a comma without a space before three digits groups them.
    Between brackets it separates, as in `(1,200)` and `\{100,200\}`, unless a group begins with a zero: `(1,000)`.
    """
    if "," not in text:
        return text
    brackets, separates = ["{"], []
    for found in _PIECE.finditer(text):
        if found[0] in CLOSING and len(brackets) > 1:
            brackets.pop()
        separates += [brackets[-1] in ("(", "[", r"\{")] * len(found[0])
        if found[0] in _OPENING:
            brackets.append(found[0])
    return _GROUPED.sub(
        lambda run: run[0] if separates[run.start()] and ",0" not in run[0] else run[0].replace(",", ""), text
    )


def _repeating(text: str) -> str:
    r"""The text with each decimal that repeats as `0.1\overline{6}`."""
    if not re.search(r"[.,]", text):
        return text
    text = _DOTTED_BLOCK.sub(lambda run: rf"\overline{{{''.join(filter(None, run.groups()))}}}", text)
    text = _BAR.sub(lambda run: rf"\overline{{{run[1] or run[2]}}}", text)
    text = _BAR_AND_DOTS.sub(r"\1", _BARS_SIDE_BY_SIDE.sub(r"\1\2", text))
    for decimal in (_BEFORE_BAR, _PARENTHESES):
        text = decimal.sub(lambda run: rf"{run[1] or '0'}.{run[2] or ''}\overline{{{run[3] or run[4]}}}", text)
    return _DOTS.sub(_dotted, text)


def _dotted(found: re.Match[str]) -> str:
    """`0.333...` and `0.1666...`: the block must be seen three times, or twice and nothing else; `3.14...` goes on."""
    digits = found[2]
    repeats = _REPEATS.match(digits[::-1])
    if repeats is None:
        return rf"{found[1]}.{digits}\ldots "
    block = (repeats[1] or repeats[2])[::-1]
    return rf"{found[1] or '0'}.{digits[: len(digits) - len(repeats[0])]}\overline{{{block}}}"


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

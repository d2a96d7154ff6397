r"""One spelling for one thing: what two typesetters write differently becomes the same string.

Pure string work, linear or nearly so on text within the caps. The output is still LaTeX: `\frac{1}{2}`, `\sqrt{2}`,
`\le`, `\{1,2\}`; words stay in `\text{...}`. Nothing here decides whether two answers are equal.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator
from functools import lru_cache

import regex

from grail_lightning.answers.chinese import translated
from grail_lightning.answers.find import last_box
from grail_lightning.answers.lexicon import unit_name
from grail_lightning.answers.phrases import (
    number_in_bold,
    with_one_spelling,
    without_environment,
    without_phrases,
    without_separators,
)

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
_NAMED = (
    "∞infty √sqrt ≤le ⩽le ≦le ≥ge ⩾ge ≧ge ≠ne ±pm ∓mp ∪cup ∩cap ∖setminus ∅emptyset ∈in ≈approx ∠angle ∥parallel "
    "△triangle ∆triangle ⟂perp ⊥perp ≡equiv ⟨langle ⟩rangle ‖| …ldots"
)
_SYMBOLS = str.maketrans(
    {letter: rf"\{name} " for letter, name in _GREEK_LETTERS.items()}
    | {named[0]: rf"\{named[1:]} " for named in _NAMED.split()}
    | {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
    | dict.fromkeys("−–—‒‑‐⁃﹣－", "-")
    | dict.fromkeys("⋅·∙•×✕⨯⨉∗", "*")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("′’‘", "'")
    | dict.fromkeys("“”", '"')
    | dict.fromkeys("°º˚", r"^\circ ")
    | dict.fromkeys("¢￠", r"\text{cents}")
    | {
        "∣": "|",
        "％": "%",
        "∶": ":",
        "‰": r"\text{permille}",
        "。": ".",
        "、": ",",
        "∛": r"\sqrt[3]",
        "∜": r"\sqrt[4]",
        "【": "",
        "】": "",
        "￡": "£",
        "￥": "¥",
        **dict.fromkeys("✓✔☑✅∎∴∵■□\u200b\u200c\u200d\u2060\ufeff"),
    }
)
_SCRIPTS = [
    (mark, re.compile(f"[{scripts}]+"), str.maketrans(scripts, plain))
    for mark, scripts, plain in (("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n"), ("_", "₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-"))
]
# One spelling for each command: the text that stands for it, and the names that say the same.
_SPELLINGS = {
    r"\frac": "dfrac tfrac cfrac nicefrac sfrac",
    r"\binom": "dbinom tbinom",
    r"\le ": "leq leqslant leqq",
    r"\ge ": "geq geqslant geqq",
    r"\ne ": "neq not=",
    "*": "cdot times ast bullet",
    "|": "lvert rvert vert mvert",
    r"\|": "Vert lVert rVert |",
    r"\emptyset ": "varnothing",
    **{r"\neg ": "lnot", r"\wedge ": "land", r"\vee ": "lor"},
    r"^\circ ": "degree degrees",
    **{"/": "div", "<": "lt", ">": "gt", r"\{": "lbrace", r"\}": "rbrace", "[": "lbrack", "]": "rbrack", "%": "%"},
    **{"£": "pounds", "€": "euro", "¥": "yen", r"\sqrt ": "surd", r"\log_{10} ": "lg", r"\sim ": "thicksim"},
    **{"": "therefore because checkmark blacksquare square Box qed qedsymbol qedhere smiley bigstar"},
    **{r"\epsilon ": "varepsilon", r"\theta ": "vartheta", r"\phi ": "varphi", r"\ldots ": "dots"},
    **{
        "(": "langle",
        ")": "rangle",
        " ": ", ; : > quad qquad hfill thinspace enspace medspace thickspace nobreakspace \n",
        r"\setminus ": "backslash",
    },
}
_COMMANDS = {name: spelling for spelling, names in _SPELLINGS.items() for name in names.split(" ")} | {" ": " "}
# Commands that change how something looks, not what it is.
_LOOKS_NAMES = (
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits rm bf it large "
    "Large boldsymbol bm scriptstyle scriptscriptstyle tiny scriptsize footnotesize small normalsize LARGE huge Huge !"
)
_LOOKS = frozenset(_LOOKS_NAMES.split())
# Wrappers of upright or bold type: a number, a symbol or a formula inside stands for itself, a word is a word.
_PLAIN = ("text", "textrm", "textnormal", "mathrm", "mbox", "hbox")
_UPRIGHT = (*_PLAIN, "textbf", "textit", "textsf", "mathbf", "mathit", "mathsf", "operatorname", "emph", "textsc")
_TRANSPARENT = ("underline", "boxed", "fbox", "framebox", "ensuremath", "underbrace", "overbrace")
_UNREAD = ("color", "textcolor", "colorbox", "phantom", "hspace", "tag", "label")
_WRAPPED_FUNCTIONS = FUNCTIONS | {"max", "min", "gcd", "lcm", "det", "Re", "Im", "cis"}
_WRAPPER = regex.compile(
    rf"\\(?P<name>{'|'.join((*_UPRIGHT, *_TRANSPARENT, *_UNREAD))})(?![A-Za-z])\*?\s*"
    r"(?P<group>\{(?:[^{}\\]++|\\.|(?&group))*+\})",
    regex.DOTALL,
)
_COMMAND = re.compile(r"\\(?:(?:left|right|middle)\.|([a-zA-Z]+|.))", re.DOTALL)

# Words in upright type, and what else `\text` holds.
TEXT = re.compile(r"\\text\{([^{}]*)\}")
_OPENING = frozenset(["(", "[", "{", r"\{", r"\lfloor", r"\lceil"])
CLOSING = frozenset([")", "]", "}", r"\}", r"\rfloor", r"\rceil"])
_PIECE = re.compile(r"\\text\{[^{}]*\}|\\begin\{[a-z*]+\}|\\end\{[a-z*]+\}|\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
_COMMAND_OR_BRACKET = re.compile(r"\\(?:[a-zA-Z]+|.)|[{}()\[\]]", re.DOTALL)
# Answers come again when they are short; what is kept of long ones would be a model's to grow.
CACHED_CHARACTERS = 128

# Units that would pass for a function, a letter, or a product or quotient of letters.
_UNIT = re.compile(r"min|sec|[mgsLlJNWVAKChFPT]|[A-Za-z]{1,3}\s?/\s?[A-Za-z]{1,3}(?:\^\{?[23]\}?)?")
_POWER = r"(?:\^\{?-?[1-9]\}?)?"
_SHORT = rf"[A-Za-z]{{1,3}}{_POWER}"
_PRODUCT = re.compile(rf"{_SHORT}(?:(?:\s?[/*]\s?|\s){_SHORT})*")
_BEHIND = r"(?:[0-9})]|\\pi)(?:\s|~|\\[ ,;:!])*"
_BEHIND_NUMBER = re.compile(rf"{_BEHIND}$")
# `\text{cm}^3/\text{s}` and `\frac{\text{m}}{\text{s}}` behind a number.
_TYPE = r"\\(?:text|mathrm)\s*\{[\s~]*"
_UNIT_NAME = rf"[A-Za-z]+(?:[\s~]*[/\s~][\s~]*[A-Za-z]+)?[\s~]*\}}{_POWER}"
_FIRST = rf"{_TYPE}{_UNIT_NAME}"
_NEXT = rf"(?:\s*(?:[/*]|\\cdot|\\times)\s*{_TYPE}{_UNIT_NAME}|\s*{_TYPE}/\s*{_UNIT_NAME})"
_UNITS = re.compile(rf"({_BEHIND})({_FIRST}{_NEXT}+|\\[dt]?frac\s*\{{{_FIRST}{_NEXT}*\}}\s*\{{{_FIRST}{_NEXT}*\}})")
# What separates the members of a list in words.
_LISTED = re.compile(r"(,(?!\d)|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))", re.IGNORECASE)

# Digits in groups of three. Not behind a letter, a script or an index: `a_{1,234}` has two indices.
_GROUPED = re.compile(
    r"(?<![0-9.,_^A-Za-z\\])(?<!_\{)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])(?!\.[0-9]+,[0-9])", re.ASCII
)
_DECIMAL = r"(?<![0-9A-Za-z\\.)}])([0-9]*)"
_DOTS = r"\s*(?:\.{3,}|\\[lc]?dots(?![a-z]))"
# What is replaced wherever it stands, before and after commands are read: a text without the first is not searched.
_BEFORE = [
    (",", r"(?<=\d)(?:\{,\}|,\\[!,])\s*(?=\d{3}(?!\d))", ""),  # `1{,}000` is no list
    ("\\", r"(?<=\d)\\[!, :;>]\s*(?=\d{3}(?!\d))", ""),  # `1\,000`
    (r"\\[", r"\\\\\[[\d.]+(?:pt|em|ex|mm|cm)\]", r"\\\\"),  # the space between two rows
    ("\\", r"\\[()\[]|(?<!\\)\\\]", " "),
    ("$", r"(?<!\\)\$", " "),  # a delimiter
    (r"\rm", r"\{\\rm\s+([^{}]*)\}|\\rm\s*\{([^{}]*)\}", r"\\mathrm{\1\2}"),
    ("`", "`", ""),
    ("**", r"^\s*\*\*([^*]+)\*\*(?=\w)", r"\1"),
    ("**", r"(?<=[\w)}])\*\*(?=[\w({\\-])", "^"),  # a power in a programming language
    ("*", r"^\s*\*+([A-Za-z ]+)\*+(?=\s*:)", r"\1"),
    (":=", r":=", "="),
    ("*", r"^\s*\*+(?=[^*])|\*\*|(?<=[^*^])\*+\s*$", ""),  # bold type of Markdown
    ("__", r"(?<![\w}])__(?=\S)|(?<=[^\s_])__(?![\w{])", ""),
    ("...", r"(?<=[,+*<=-])\s*\.{3,}", r"\\ldots "),
    ("x", r"(?<=\d)\s*x\s*(?=10\^)", "*"),
    ("^", r"\^\s*\{?\s*(?:\\(?:text|mathrm)\{\s*)?(st|nd|rd|th)\s*\}{1,2}", r"\1"),  # `3^{\text{rd}}`
    (".", r"(?<![A-Za-z])([apAP])\.\s?([mM])(?:\.|(?![A-Za-z]))", r"\1\2"),
]
_AFTER = [
    (r"\dot", r"\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?", r"\\overline{\1\2\3}"),
    ("\\", r"\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))", r"\\overline{\1\2}"),
    # `0.5(3)` is half of three where it is a part of something; alone it is 0.5333…
    (
        "(",
        _DECIMAL + r"(?:\.|,(?=\())([0-9]*)\(([0-9]+)\)(?=\s*(?:$|[,;)\]}%]|\\(?:%|text|pi)))",
        r"\1.\2\\overline{\3}",
    ),
    # `0.333...`: the block must be seen three times; `3.14...` goes on.
    (
        ".",
        rf"{_DECIMAL}\.(?=[0-9]{{3,99}}{_DOTS})([0-9]*?)([0-9]+?)\3{{2,}}(?![0-9]){_DOTS}(?!\s*[0-9A-Za-z.(])",
        r"\1.\2\\overline{\3}",
    ),
    (".", rf"(?<=[0-9]){_DOTS}(?!\s*[0-9A-Za-z.(])", r"\\ldots "),
]
_Rules = list[tuple[str, re.Pattern[str], str]]
_RULES_BEFORE, _RULES_AFTER = (
    [(needle, re.compile(pattern), replacement) for needle, pattern, replacement in rules]
    for rules in (_BEFORE, _AFTER)
)


def balanced(text: str) -> bool:
    r"""Whether braces nest, and the other brackets are as many open as closed (kinds may mix: `[0,1)`)."""
    depths = {True: 0, False: 0}  # of braces, and of the others
    for piece in _COMMAND_OR_BRACKET.findall(text):
        depths[piece in ("{", "}")] += (piece in _OPENING) - (piece in CLOSING)
        if min(depths.values()) < 0:
            return False
    return not any(depths.values())


def pieces(text: str) -> Iterator[tuple[int, str, int]]:
    r"""Tokens of a text with their place and the depth of brackets around them; `\text{...}` is one token."""
    depth = 0
    for match in _PIECE.finditer(text):
        piece = match[0]
        depth -= piece in CLOSING or piece.startswith(r"\end{")
        yield match.start(), piece, depth
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
    text = _replaced(number_in_bold(without_environment(_unicode(text))), _RULES_BEFORE)
    text = _grouped(_commands(text))
    text = _trimmed(_replaced(text, _RULES_AFTER) if "." in text or "," in text else text)
    text = without_separators(_trimmed(without_phrases(text)))
    text = with_one_spelling(text)
    # A function of nothing is a word.
    return rf"\text{{{text[1:]}}}" if text[:1] == "\\" and text[1:] in _WRAPPED_FUNCTIONS else text


_of_short = lru_cache(maxsize=1 << 12)(_normalised)


def _replaced(text: str, rules: _Rules) -> str:
    for needle, pattern, replacement in rules:
        if needle in text:
            text = pattern.sub(replacement, text)
    return text


def _unicode(text: str) -> str:
    if text.isascii():
        return text
    for mark, runs, table in _SCRIPTS:
        text = runs.sub(rf"{mark}{{\g<0>}}", text).translate(table)
    return translated("".join(map(_compatible, text.translate(_SYMBOLS))))


def _compatible(character: str) -> str:
    form = unicodedata.normalize("NFKC", character)
    upper, slash, lower = form.partition("\u2044")  # one half is a single character
    return rf"\frac{{{upper}}}{{{lower}}}" if slash and lower else form


def _commands(text: str) -> str:
    if "\\" in text:
        text = _UNITS.sub(_one_text, text)
        text = _COMMAND.sub(_respelled, _WRAPPER.sub(_unwrapped, text))
    if "!=" in text:  # `5!=120` is a factorial.
        text = re.sub(r"((?<![A-Za-z0-9_^{.])[0-9]+!?)?!=", lambda sign: sign[0] if sign[1] else r"\ne ", text)
    return text.replace("~", " ").replace("<=", r"\le ").replace(">=", r"\ge ")


def _one_text(units: re.Match[str]) -> str:
    r"""`\text{cm^3/s}` for units that stand in types of their own, if all of them are known."""
    inside = re.sub(r"\\(?:text|mathrm|[dt]?frac)|[{}]", "", re.sub(r"\}\s*\{", "}/{", units[2]))
    inside = re.sub(r"\\(?:cdot|times)", "*", inside).replace("~", " ")
    inside = re.sub(r"\s*([/*])\s*", r"\1", inside).strip()
    return rf"{units[1]}\text{{{inside}}}" if _are_units(inside) else units[0]


def _is_unit(word: str) -> bool:
    product = not word.isalpha() and _PRODUCT.fullmatch(word)
    return bool(_UNIT.fullmatch(word) or (product and _are_units(word)))


def _are_units(text: str) -> bool:
    return all(map(unit_name, re.findall(r"[a-z]+", text.lower())))


def _respelled(command: re.Match[str]) -> str:
    name = command[1]
    if name is None or name in _LOOKS:
        return " " if name and name.isalpha() and command.string[command.end() :][:1].isalnum() else ""
    return _COMMANDS.get(name, command[0])


def _unwrapped(wrapper: "regex.Match[str]") -> str:
    name, inner = wrapper["name"], wrapper["group"][1:-1]
    if name in _UNREAD:
        return ""
    if name in _TRANSPARENT:
        return f"{{{_commands(inner)}}}"
    inner = re.sub(r"\s+", " ", TEXT.sub(r"\1", _commands(inner)))
    word = inner.strip()
    applied = word == "sec" and re.match(r"[ ~]*[A-Za-z0-9({|\\^]", wrapper.string[wrapper.end() :])
    behind = _BEHIND_NUMBER.search(wrapper.string[: wrapper.start()])
    if name in _PLAIN and behind and not applied and _is_unit(word):
        return rf"\text{{{re.sub('[{}]', '', word)}}}"
    if word in _WRAPPED_FUNCTIONS or word.lower() == "infinity":
        return rf"\{word} " if word in _WRAPPED_FUNCTIONS else r"\infty "
    if not _has_word(word):
        return f" {word} " if word else " "
    if _LISTED.search(inner):  # `\text{red, blue and 3}` is `\text{red},\text{blue}\text{and}3`
        return "".join(rf"\text{{{part}}}" if _has_word(part) else f" {part} " for part in _LISTED.split(inner))
    number = re.match(r"\s*([+-]?[0-9][0-9.,]*)(?=\s+[A-Za-z][^0-9]*$)", inner)
    if number and wrapper[0].strip() == wrapper.string.strip():  # All of the answer: `5 cm`.
        return rf"{number[1]}\text{{{inner[number.end() :]}}}"
    return rf"\text{{{inner}}}"


def _has_word(text: str) -> bool:
    """Whether a text has two letters side by side, or an abbreviation, beside its commands."""
    return re.search(r"[A-Za-z]{2}|[A-Za-z]\.", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _grouped(text: str) -> str:
    r"""The text with digits in groups of three run together.

    Between braces of a command, and outside of all brackets, a comma without a space before three digits groups them.
    Between brackets it separates, as in `(1,200)` and `\{100,200\}`, unless a group begins with a zero: `(1,000)`.
    """
    if not _GROUPED.search(text):
        return text
    brackets, separates = ["{"], []
    for match in _PIECE.finditer(text):
        if match[0] in CLOSING and len(brackets) > 1:
            brackets.pop()
        separates += [brackets[-1] in ("(", "[", r"\{")] * len(match[0])
        if match[0] in _OPENING:
            brackets.append(match[0])
    return _GROUPED.sub(
        lambda run: run[0] if separates[run.start()] and ",0" not in run[0] else run[0].replace(",", ""), text
    )


_NEEDLESS = re.compile(r"(?<![A-Za-z0-9.}])\s|\s(?![A-Za-z0-9.\\{(])")
_NEEDLESS_BEHIND = re.compile(r"(?<=\d)\s(?=\\(?!text|frac))|(?<=\})\s(?=[\\{(])")


def _trimmed(text: str) -> str:
    text = " ".join(text.split())
    # A space stays where it keeps a command from its letter, a word from its neighbour and a number from the next.
    if " " in text:
        text = _NEEDLESS.sub("", text)
        text = _NEEDLESS_BEHIND.sub("", text)
    while text.endswith((".", ",", ";", r"\\")) and not text.endswith(r"\,"):
        text = text[: -2 if text.endswith(r"\\") else -1].rstrip()
    return text


_SINGLE = re.compile(r"\{([A-Za-z0-9])\}")
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def string_key(text: str) -> str:
    r"""For string equality: `{x}` is `x`, and only the space between two digits tells anything."""
    if "{" in text:
        text = _SINGLE.sub(r"\1", text)
    return _SPACE.sub("", text) if " " in text or not text.isprintable() else text

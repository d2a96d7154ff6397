r"""Spellings of one thing: Unicode and LaTeX letters and commands, digits in groups of three, decimals that repeat."""

import re

__all__ = [
    "BARE_WORDS",
    "COMMON",
    "ELEMENTARY",
    "FUNCTIONS",
    "GREEK",
    "GREEK_LETTERS",
    "HYPERBOLIC",
    "INVERSE",
    "LOGARITHMS",
    "TRIGONOMETRIC",
    "grouped",
    "repeating",
]


TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
INVERSE = {name: f"arc{name}" for name in TRIGONOMETRIC}
HYPERBOLIC = ("sinh", "cosh", "tanh")
LOGARITHMS = ("ln", "log")
# A text in which one of these stands is a formula, not a unit or a name.
ELEMENTARY = (*TRIGONOMETRIC, *LOGARITHMS, "exp")
# What answers use, and what every library knows.
COMMON = frozenset([*ELEMENTARY, "arcsin", "arccos", "arctan", *HYPERBOLIC])
# All that the parser reads.
FUNCTIONS = COMMON | frozenset([*INVERSE.values(), "coth"])
# Constants that are written as words, too.
BARE_WORDS = {"pi": "pi", "infinity": "inf", "infty": "inf", "inf": "inf", "oo": "inf"}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK_LETTERS = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK_NAMES.split(), strict=True))
# Those that are no number, and what answers use like them.
GREEK = frozenset([*GREEK_LETTERS.values(), "Upsilon", "hbar", "ell"]) - {"pi"}


# ruff: noqa: RUF001 (these are tables of letters that look alike)


# Characters with the command of each.
_NAMED = (
    "∞infty √sqrt ≤le ⩽le ≥ge ⩾ge ≠ne ±pm ∓mp ∪cup ∩cap ∅emptyset ∈in ≈approx ∠angle ⌊lfloor ⌋rfloor ⌈lceil ⌉rceil "
    "∖setminus ⟨langle ⟩rangle …ldots"
)
SYMBOLS = str.maketrans(
    {letter: rf"\{name} " for letter, name in GREEK_LETTERS.items()}
    | {named[0]: rf"\{named[1:]} " for named in _NAMED.split()}
    | {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
    | dict.fromkeys("−–—‒﹣－", "-")
    | dict.fromkeys("⋅·∙•×✕∗", "*")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("′’‘", "'")
    | dict.fromkeys("“”", '"')
    | dict.fromkeys("°º", r"^\circ ")
    | dict.fromkeys("£€¥", r"\$")
    | {"∛": r"\sqrt[3] ", "∣": "|", "¢": r"\text{cents}", "％": "%", "\u200b": "", "\ufeff": ""}
)
SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
COMMANDS = {
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], r"\frac"),
    **dict.fromkeys(["dbinom", "tbinom"], r"\binom"),
    **dict.fromkeys(["leq", "leqslant", "leqq"], r"\le "),
    **dict.fromkeys(["geq", "geqslant", "geqq"], r"\ge "),
    **dict.fromkeys(["neq", "not="], r"\ne "),
    **dict.fromkeys(["cdot", "times", "ast", "bullet"], "*"),
    **dict.fromkeys(["lvert", "rvert", "vert", "mvert"], "|"),
    **dict.fromkeys(["varnothing", "empty"], r"\emptyset "),
    **dict.fromkeys(["Omega", "ohm"], r"\Omega "),
    **dict.fromkeys(["land", "wedge"], r"\text{and}"),
    **dict.fromkeys(["lor", "vee"], r"\text{or}"),
    **dict.fromkeys(["simeq", "thickapprox"], r"\approx "),
    **dict.fromkeys(["dots", "dotsc", "hdots"], r"\ldots "),
    **dict.fromkeys(["arcctg", "arccotan"], r"\arccot "),
    **dict.fromkeys(["reals", "R", "Reals"], r"\mathbb{R}"),
    **{"div": "/", "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "%": "%"},
    **{"colon": ":", "tg": r"\tan ", "ctg": r"\cot ", "cosec": r"\csc ", "arctg": r"\arctan ", "degree": r"^\circ "},
    **{"degrees": r"^\circ ", "prime": "'", "varepsilon": r"\epsilon ", "vartheta": r"\theta ", "varphi": r"\phi "},
    **{"imath": "i", "backslash": r"\setminus ", "smallsetminus": r"\setminus ", "minus": "-", "lg": r"\log_{10}"},
}
# Commands that change how something looks, not what it is.
_LOOKS = (
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle "
    "scriptstyle limits nolimits rm bf it cal mathstrut strut nonumber notag normalsize large Large small "
    "boldsymbol bm !"
)
LOOKS = frozenset(_LOOKS.split())
_SPACES = ", ; : > quad qquad thinspace medspace thickspace enspace space nobreakspace"
SPACES = frozenset([*_SPACES.split(), " ", "\n"])
# Wrappers of upright or bold type: a number, a symbol or a formula inside stands for itself, a word is a word.
_UPRIGHT = (
    "text textbf textit textrm textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mathnormal mbox hbox "
    "operatorname emph mathop textup mathcal textsc textsl textmd"
)
UPRIGHT = frozenset(_UPRIGHT.split())
TEXT = frozenset(["text", "textrm", "textnormal", "mathrm", "mbox", "hbox", "textup"])
UNIT_LETTERS = frozenset("mgsLlJNWVAKChFPT")
ACCENTS = ("bar", "hat", "vec")
TRANSPARENT = ("underline", "boxed", "fbox", "ensuremath", "mathord", "mathrel", "mathbin")
# With those whose argument is nothing that is read.
WRAPPERS = frozenset([*ACCENTS, *TRANSPARENT, "color", "textcolor", "phantom", "hspace", "tag", "label"])
WRAPPED_FUNCTIONS = FUNCTIONS | {"max", "min", "gcd", "lcm", "det", "floor", "ceil"}
TEXT_SYNONYMS = {"arccotg": "arccot", "sh": "sinh", "ch": "cosh", "th": "tanh"}


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
    r"""The text with each decimal that repeats as `0.1\overline{6}`."""
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

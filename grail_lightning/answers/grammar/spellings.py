"""Spellings: what Unicode and LaTeX have several of, and what only changes how a formula looks."""

# ruff: noqa: RUF001 (these are tables of letters that look alike)

from grail_lightning.answers.grammar.functions import FUNCTIONS, GREEK_LETTERS

__all__ = [
    "COMMANDS",
    "LOOKS",
    "SPACES",
    "SUB",
    "SUPER",
    "SYMBOLS",
    "TEXT",
    "TEXT_SYNONYMS",
    "TRANSPARENT",
    "UNIT_LETTERS",
    "UPRIGHT",
    "WRAPPED_FUNCTIONS",
]


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


SYMBOLS = {
    **{character: rf"\{name} " for character, name in GREEK_LETTERS.items()},
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("⋅·∙•×✕∗", "*"),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("′’‘", "'"),
    **dict.fromkeys("“”", '"'),
    **{
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "∛": r"\sqrt[3] ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "≤": r"\le ",
        "⩽": r"\le ",
    },
    **{"≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap "},
    **{"∅": r"\emptyset ", "∈": r"\in ", "≈": r"\approx ", "∠": r"\angle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
    **{"ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "⌊": r"\lfloor ", "⌋": r"\rfloor "},
    **{"⌈": r"\lceil ", "⌉": r"\rceil ", "∖": r"\setminus ", "⟨": r"\langle ", "⟩": r"\rangle ", "∣": "|"},
    **{
        "£": r"\$",
        "€": r"\$",
        "¥": r"\$",
        "¢": r"\text{cents}",
        "％": "%",
        "\u200b": "",
        "\ufeff": "",
        "…": r"\ldots ",
    },
}
SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))


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
LOOKS = _set(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle "
    "scriptstyle limits nolimits rm bf it cal mathstrut strut nonumber notag normalsize large Large small "
    "boldsymbol bm"
)
SPACES = _set(", ; : > ! quad qquad thinspace medspace thickspace enspace space nobreakspace") | {
    " ",
    "\n",
}
# Wrappers of upright or bold type: a number, a symbol or a formula inside stands for itself, a word is a word.
UPRIGHT = _set(
    "text textbf textit textrm textsf texttt textnormal mathrm mathbf mathit mathsf mathtt mathnormal mbox hbox "
    "operatorname emph mathop textup mathcal textsc textsl textmd"
)
TEXT = frozenset(["text", "textrm", "textnormal", "mathrm", "mbox", "hbox", "textup"])
UNIT_LETTERS = frozenset("mgsLlJNWVAKChFPT")
TRANSPARENT = _set("underline boxed fbox ensuremath mathord mathrel mathbin hat bar vec")
WRAPPED_FUNCTIONS = FUNCTIONS | _set("max min gcd lcm det floor ceil")
TEXT_SYNONYMS = {"arccotg": "arccot", "sh": "sinh", "ch": "cosh", "th": "tanh"}

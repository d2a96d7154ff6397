"""Spellings: what Unicode and LaTeX have several of, and what only changes how a formula looks."""

# ruff: noqa: RUF001 (these are tables of letters that look alike)

from grail_lightning.answers.grammar.functions import FUNCTIONS, GREEK_LETTERS

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

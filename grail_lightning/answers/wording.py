r"""Words in answers, and the sides of equations that only name what the others are."""

import re
from fractions import Fraction

from grail_lightning.answers.normalise import ELEMENTARY, GREEK, TEXT, TRIGONOMETRIC
from grail_lightning.answers.parse import letters, number
from grail_lightning.answers.structure import Answer, Leaf, Relation, Words

_FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{(0*[1-9][0-9]*)\}", re.ASCII)
# A whole number to the power of one half that is nobody's script or argument: behind `_`, `^`, `}`, a letter or a digit
# it could be one, unless that ends a complete factor.
_HALF_POWER = re.compile(
    r"(?:(\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\})|(?<![A-Za-z}\]^_.,\\])|(?<=\^\{1/2\}))"
    r"(?:\{([0-9]+)\}|(?<![0-9])([0-9]+))\^(?:\{1/2\}|\{\\frac\{1\}\{2\}\}|\\frac\{1\}\{2\})",
    re.ASCII,
)
_WRAPPED_WORD = re.compile(r"\\text\{[^{}]*[A-Za-z]\.?[A-Za-z][^{}]*\}", re.ASCII)
_WORDING = re.compile(r"[A-Za-z0-9 ,.:;'!?/()-]+", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*")
_WORDY = re.compile(r"\\text|(?<![\\A-Za-z])[A-Za-z]{4,}|\?|\"")


def lowest_terms(text: str) -> str:
    r"""The text with each `\frac` of two whole numbers in lowest terms, and `n^{1/2}` as `\sqrt{n}`.

    One spelling of a number replaces another in its place, so a text keeps its meaning whatever it is.
    """
    return _HALF_POWER.sub(r"\1\\sqrt{\2\3}", _FRACTION.sub(_reduced, text))


def _reduced(found: re.Match[str]) -> str:
    value = Fraction(int(found[1]), int(found[2]))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def same_wording(one: str, two: str, *, ignore_case: bool) -> bool:
    r"""Whether two answers without formulas are the same but for upright type around words, as `\text{June 20}`."""
    if not (_WRAPPED_WORD.search(one) or _WRAPPED_WORD.search(two)):
        return False
    plain = [_plain(text) for text in (one, two)]
    if not all(map(_WORDING.fullmatch, plain)):
        return False
    if ignore_case and not re.search(r"[0-9] ?[A-Za-z]", plain[0] + "|" + plain[1]):
        plain = [text.lower() for text in plain]
    return plain[0] == plain[1]


def _plain(text: str) -> str:
    text = re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text))
    return re.sub(r" ?([,.:;!?/()-]) ?", r"\1", text).strip(' "').rstrip(".!")


def spelled_alike(one: Answer, two: Answer, *, ignore_case: bool) -> bool:
    """Whether one answer is words and the other the same letters without upright type: `odd` is no product then."""
    words, bare = (one, two) if isinstance(one, Words) else (two, one)
    if not isinstance(words, Words) or not isinstance(bare, Leaf) or not _LETTERS.fullmatch(bare.quantity.text):
        return False
    text = bare.quantity.text
    return words.exact.lower() == text.lower() if ignore_case else words.exact == text


def anagrams(one: str, two: str) -> bool:
    """Whether two texts are words of the same letters, which a letter that comes twice tells from products: `SAS`."""
    words = [text.lower() for text in (one, two) if text.isascii() and text.isalpha() and len(text) > 2]
    return len(words) == 2 and words[0] != words[1] and len(set(words[0])) < len(words[0])


def wordy(text: str) -> bool:
    """Whether a formula that cannot be read has words in it, which no mathematical library should see."""
    return bool(_WORDY.search(text))


# What a name is applied to: `(2)`, `(A\mid B)`, `(X\ge 2)`, `[X]`.
_ARGUMENT = r"[A-Za-z0-9_^,;.|'\s\\{}=<>+-]*"
_VECTOR = r"\\(?:bar|hat|vec|overline|overrightarrow|mathbf)\{(?:[A-Za-z]|[A-Z]{2,3})\}"
_COMPLEX = r"[zw](?:_[0-9])?"
_SIZE = rf"\|(?:[A-Z]{{1,2}}|{_COMPLEX}(?:\s?[+-]?\s?{_COMPLEX})*|{_VECTOR})\|"
_ANGULAR = "|".join(TRIGONOMETRIC)
_COMMAND = rf"\\(?!frac|sqrt|pi|infty|{_ANGULAR}|l[no]|exp|int|sum|text)[a-zA-Z]+"
_NAME = re.compile(
    rf"""(?:m?\\(?:angle|triangle)\s?)?
    (?P<head>\\text\{{[A-Za-z][^{{}}]*\}}|\\mathbb\{{[A-Z]\}}|{_VECTOR}|{_SIZE}|\[[A-Z]{{3,6}}\]|[A-Z]{{2,5}}
      |[A-Za-z]{{3,}}(?:\s(?:of|[A-Za-z]{{3,}}))*|[A-Za-z]|{_COMMAND})
    (?:'|_\{{[^{{}}]*\}}|_\\text\{{[^{{}}]*\}}|_[A-Za-z0-9]|\^\{{-1\}})*
    (?P<argument>\s?\({_ARGUMENT}\)|\[{_ARGUMENT}\])?""",
    re.VERBOSE,
)
# A head that has a sum, a product or a power as its argument only if it is the usual name of a function, or a word.
_FUNCTION = re.compile(
    r"[fghEFGHPQ]|\\text.*|\\mathbb.*|(?![A-Z]+$|[a-z]{3}$)[A-Za-z\s]{3,}|\\(?:phi|psi|sigma|tau|mu|omega|zeta|[A-Z][a-z]+|Pr)"
)
_ARITHMETIC = re.compile(r"[A-Za-z0-9}]\s*[+-]|[0-9]\s*[A-Za-z]|[A-Za-z]\s*\^\{?[0-9]|\\frac[0-9{}\s]*[A-Za-z]")
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_RATIO = re.compile(rf"\\frac{_GROUP}{_GROUP}|([^/]*)/(.*)", re.DOTALL)
_ANGLE = r"[2-9]?\s?(?:\\angle\s?[A-Z]{1,3}|[A-Z]|\\(?:alpha|beta|gamma|delta|theta|phi|psi|omega)(?![a-zA-Z]))"
# A function of an angle that has a name: `\sin x=7` is an equation to be solved.
_OF_ANGLE = re.compile(
    rf"\\(?:{_ANGULAR})\s?(?:\^\{{?[2-9]\}}?\s?)?"
    rf"(?:\(?{_ANGLE}(?:\s?[+-]\s?{_ANGLE})*\)?|\(?\\frac\{{{_ANGLE}\}}\{{[2-9]\}}\)?)"
)
_FUNCTION_WORD = re.compile(rf"\b(?:{'|'.join(ELEMENTARY)}|sqrt)\b")
# A letter without a value of its own (`e_1` has none, e and i have), or a segment; possessive, so linear on any text.
_SYMBOL = (
    rf"(?:[A-Z]++|(?![ei](?![_']))[a-z]|\\(?:{'|'.join(GREEK)})(?![a-zA-Z]))(?:_\{{[A-Za-z0-9]++\}}|_[A-Za-z0-9]|')*+"
)
_SUM_OR_PRODUCT = re.compile(rf"{_SYMBOL}(?:(?:\s?[+-]\s?{_SYMBOL})++|(?:\s?\*?\s?{_SYMBOL})++)")
# In small letters: `NO` is a segment.
_DENIED = re.compile(r"\b(?:[Nn]ot?|[Nn]ever|[Nn]either|nor|isn't|cannot|false|wrong)\b")


def is_name(source: str) -> bool:
    r"""Whether a side of an equation only names what the other is: `x`, `T_{4}`, `f(x)`, `\text{Volume}`, `(x,y)`."""
    source = source.strip()
    if _OF_ANGLE.fullmatch(source):
        return True
    if source.startswith("(") and source.endswith(")"):
        return all(map(is_name, source[1:-1].split(",")))
    return all(_is_one_name(part.strip()) for part in source.split(":"))


def _is_one_name(part: str) -> bool:
    name = _NAME.fullmatch(part)
    if name is None or _FUNCTION_WORD.search(part) or _DENIED.search(part):
        return False
    return not name["argument"] or not _is_product(name["head"], name["argument"])


def _is_product(head: str, argument: str) -> bool:
    """Whether a bracket is a factor: `x(x+1)` and `a(b+c)` are products, `f(x+1)` and `P(A)` are names."""
    if re.fullmatch(r"\\?[A-Za-z]+", head):  # A quantity in its own argument, unless it is applied there: `f(f(2))`.
        symbols = [head] if head.startswith("\\") or len(head) > 3 else sorted(set(head))
        if all(re.search(rf"(?<![A-Za-z\\]){re.escape(symbol)}(?![A-Za-z(_])", argument) for symbol in symbols):
            return True
    return not _FUNCTION.fullmatch(head) and "," not in argument and bool(_ARITHMETIC.search(argument))


def _is_ratio(source: str) -> bool:
    r"""Whether a side is the quotient of two names, each of one quantity: `\frac{NO}{BO}`, `AB/CD`."""
    ratio = _RATIO.fullmatch(source.strip())
    return ratio is not None and all(_is_one_name(name.strip()) for name in ratio.groups() if name is not None)


def _is_sum_or_product(source: str) -> bool:
    r"""Whether a side is a sum, a difference or a product of different names: `a+b+c`, `b-a`, `mn`, `AB*AC`.

    With a number or a power in it, as `2x+3y` and `x^2+y^2`, it is the side of a curve's equation.
    """
    source = source.strip()
    if not _SUM_OR_PRODUCT.fullmatch(source) or _FUNCTION_WORD.search(source) or _DENIED.search(source):
        return False
    symbols = re.findall(_SYMBOL, source)
    return len(set(symbols)) == len(symbols)


def named_sides(relation: Relation, said: Answer | None = None) -> list[bool]:
    """Of each side whether it only names the others; at least one side is always a value.

    A ratio of quantities is a name where there is no simpler one: the value of `x=a/b` is the ratio. So are sums and
    products where an equation is to say a number other than 0.
    """
    number_said = isinstance(said, Leaf) and without_letters(said) and said.node != number(0)
    combined = number_said and set(relation.signs) == {"="}
    named = [is_name(source) for source in relation.sources]
    if not any(named):
        wide = [_is_ratio(source) or (combined and _is_sum_or_product(source)) for source in relation.sources]
        named = [name and not all(wide) for name in wide]
    if all(named):  # `x = y`: a formula that happens to look like a name
        named[-1] = False
    return named


def named_value(relation: Relation) -> Answer | None:
    """What a relation says of its name, or None if it is more than a name and a value.

    `m+n=113` says 113. With coordinates alone, `x+y=113` is a line.
    """
    line = all(re.fullmatch(r"[xyz\s+-]*|[0-9.\s-]*", source) for source in relation.sources)
    named = named_sides(relation, None if line else relation.sides[-1])
    if set(relation.signs) <= {"=", r"\in"} and named[0]:
        return relation.sides[-1]
    return relation.sides[0] if relation.signs == ("=",) and named[1] else None


def without_letters(answer: Answer) -> bool:
    """Whether an answer is a formula that is a number."""
    return isinstance(answer, Leaf) and answer.node is not None and not letters(answer.node)


def has_other_letters(side: Answer, name: Answer) -> bool:
    """Whether a side is a formula with letters, none of which is the name: `x=2x=12` says more than `x=12`."""
    if not isinstance(side, Leaf) or side.node is None or without_letters(side):
        return False
    symbol = isinstance(name, Leaf) and name.node is not None and name.node.kind == "symbol" and name.node.value
    return symbol not in letters(side.node)

r"""The sides of an equation that only name what the others are: `x`, `f(2)`, `AB`, `m+n`."""

import re

from grail_lightning.answers.normalise import ELEMENTARY, GREEK, TRIGONOMETRIC
from grail_lightning.answers.parse import DERIVATIVE, DIFFERENTIABLE, letters, number
from grail_lightning.answers.structure import Answer, Chain, Leaf

# What a name is applied to: `(2)`, `(A\mid B)`, `(X\ge 2)`, `[X]`, `(g(2))`.
_ARGUMENT = r"(?:[A-Za-z0-9_^,;.|'\s\\{}=<>+-]|\([A-Za-z0-9]\))*"
_VECTOR = r"\\(?:bar|hat|vec|overline|overrightarrow|mathbf)\{(?:[A-Za-z]|[A-Z]{2,3})\}"
_COMPLEX = r"[zw](?:_[0-9])?"
_SIZE = rf"\|(?:[A-Z]{{1,2}}|{_COMPLEX}(?:\s?[+-]?\s?{_COMPLEX})*|{_VECTOR})\|"
_ANGULAR = "|".join(TRIGONOMETRIC)
_COMMAND = rf"\\(?!frac|sqrt|pi|infty|{_ANGULAR}|l[no]|exp|int|sum|text)[a-zA-Z]+"
_NAME = re.compile(
    rf"""(?:m?\\(?:angle|triangle)\s?)?
    (?P<head>\\text\{{[A-Za-z][^{{}}]*\}}|\\mathbb\{{[A-Z]\}}|{_VECTOR}|{_SIZE}|{DERIVATIVE}|\[[A-Z]{{3,6}}\]|[A-Z]{{2,5}}
      |[A-Za-z]{{3,}}(?:\s(?:of|[A-Za-z]{{3,}}))*|[A-Za-z]|{_COMMAND})
    (?:'|_\{{[^{{}}]*\}}|_\\text\{{[^{{}}]*\}}|_[A-Za-z0-9]|(?<![xyzt])\^\{{-1\}}(?=\s?[(\[]|$)|(?<=[{DIFFERENTIABLE}])\^\{{\([0-9n]\)\}})*
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
# In small letters: `NO` is a segment.
_NO_NAME = re.compile(rf"\b(?:{'|'.join(ELEMENTARY)}|sqrt|[Nn]ot?|[Nn]ever|[Nn]either|nor|isn't|cannot|false|wrong)\b")
# A letter without a value of its own (`e_1` has none, e and i have), or a segment; possessive, so linear on any text.
_SYMBOL = (
    rf"(?:[A-Z]++|(?![ei](?![_']))[a-z]|\\(?:{'|'.join(GREEK)})(?![a-zA-Z]))(?:_\{{[A-Za-z0-9]++\}}|_[A-Za-z0-9]|')*+"
)
_SUM_OR_PRODUCT = re.compile(rf"{_SYMBOL}(?:(?:\s?[+-]\s?{_SYMBOL})++|(?:\s?\*?\s?{_SYMBOL})++)")


def _is_name(source: str) -> bool:
    r"""Whether a side of an equation only names what the other is: `x`, `T_{4}`, `f(x)`, `\text{Volume}`, `(x,y)`."""
    source = source.strip()
    if _OF_ANGLE.fullmatch(source):
        return True
    if source.startswith("(") and source.endswith(")"):
        return all(map(_is_name, source[1:-1].split(",")))
    return all(map(_is_one_name, source.split(":")))


def _is_one_name(part: str) -> bool:
    name = _NAME.fullmatch(part.strip())
    if name is None or _NO_NAME.search(part):
        return False
    # A bracket may be a factor: `x(x+1)` and `a(b+c)` are products, `f(x+1)`, `f(f(2))` and `P(A)` are names.
    head, argument = name["head"], name["argument"] or ""
    if re.search(rf"(?<![A-Za-z\\]){re.escape(head)}(?![A-Za-z(_])", argument):
        return False
    return bool(_FUNCTION.fullmatch(head)) or "," in argument or not _ARITHMETIC.search(argument)


def _is_combined(source: str, sums: bool) -> bool:
    r"""Whether a side is the quotient of two names or, with `sums`, a sum, a difference or a product of different ones.

    With a number or a power in it, as `2x+3y` and `x^2+y^2`, it is the side of a curve's equation.
    """
    source = source.strip()
    if ratio := _RATIO.fullmatch(source):
        return all(_is_one_name(name) for name in ratio.groups() if name is not None)
    if not sums or not _SUM_OR_PRODUCT.fullmatch(source) or _NO_NAME.search(source):
        return False
    symbols = re.findall(_SYMBOL, source)
    return len(set(symbols)) == len(symbols)


def named_sides(relation: Chain, value: Answer | None = None) -> list[bool]:
    """Of each side whether it only names the others; at least one side is always a value.

    A ratio of quantities is a name where there is no simpler one: the value of `x=a/b` is the ratio. So are sums and
    products where an equation is to say a number other than 0.
    """
    sums = isinstance(value, Leaf) and is_number(value) and value.node != number(0) and set(relation.signs) == {"="}
    named = [_is_name(source) for source in relation.sources]
    if not any(named):
        named = [_is_combined(source, sums) for source in relation.sources]
    if all(named):  # `x = y`: a formula that happens to look like a name
        named = [*named[:-1], False]
    return named


def named_value(relation: Chain) -> Answer | None:
    """What a relation says of its name, or None if it is more than a name and a value.

    `m+n=113` says 113. With coordinates alone, `x+y=113` is a line.
    """
    line = all(re.fullmatch(r"[xyz\s+-]*|[0-9.\s-]*", source) for source in relation.sources)
    named = named_sides(relation, None if line else relation.items[-1])
    if set(relation.signs) <= {"=", r"\in"} and named[0]:
        return relation.items[-1]
    return relation.items[0] if relation.signs == ("=",) and named[1] else None


def is_number(answer: Answer) -> bool:
    """Whether an answer is a formula without letters."""
    return isinstance(answer, Leaf) and answer.node is not None and not letters(answer.node)

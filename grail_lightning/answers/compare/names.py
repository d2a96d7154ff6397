"""Which side of an equation only names what the other side is."""

import re

from grail_lightning.answers.grammar.functions import ELEMENTARY, GREEK, TRIGONOMETRIC
from grail_lightning.answers.grammar.kinds import Answer, Leaf, Many, Relation
from grail_lightning.answers.grammar.nodes import letters, number
from grail_lightning.answers.grammar.normalise import string_key

__all__ = ["distinct_names", "has_other_letters", "head", "inverted", "is_name", "letters_of"]
__all__ += ["named_sides", "named_value", "without_letters"]

# What a name is applied to: `(2)`, `(A\mid B)`, `(X\ge 2)`, `[X]`.
_ARGUMENT = r"[A-Za-z0-9_^,;.|'\s\\{}=<>+-]*"
_VECTOR = (
    r"\\(?:bar|hat|vec|tilde|overline|overrightarrow|overleftarrow|widehat|overarc|mathbf)\{(?:[A-Za-z]|[A-Z]{2,3})\}"
)
_COMPLEX = r"[zw](?:_[0-9])?"
_MODULUS = rf"{_COMPLEX}(?:\s?[+-]?\s?{_COMPLEX})*|\\frac\{{{_COMPLEX}\}}\{{{_COMPLEX}\}}"
_INTERSECTION = r"[A-Z](?:\s?\\(?:cap|cup)\s?[A-Z])+"
_SIZE = rf"\|(?:[A-Z]|{_MODULUS}|[A-Z]{{2}}|{_INTERSECTION}|{_VECTOR})\||\\\|(?:[A-Za-z]|{_VECTOR})\\\|"
_ANGULAR = "|".join(TRIGONOMETRIC)
_FORMULAS = f"frac|sqrt|pi|infty|{_ANGULAR}|l[no]|exp|int|sum|text"
_COMMAND = rf"\\(?:det|dim|deg|gcd|lcm|Pr)\s?[A-Za-z]?|\\(?!{_FORMULAS})[a-zA-Z]+"
_NAME = re.compile(
    rf"""(?:\\text\{{[^{{}}]*\b[Oo]f\b[^{{}}]*\}}\s?)?
    (?:m?\\(?:angle|triangle)\s?)?
    (?P<head>\\text\{{[A-Za-z][^{{}}]*\}}|\\mathbb\{{[A-Z]\}}|{_VECTOR}|{_SIZE}|\[[A-Z]{{3,6}}\]|[A-Z]{{2,5}}
      |[A-Za-z]{{3,}}(?:\s(?:of|[A-Za-z]{{3,}}))*|[A-Za-z]|{_COMMAND})
    (?:'|_\{{[^{{}}]*\}}|_\\text\{{[^{{}}]*\}}|_[A-Za-z0-9]|\^\{{-1\}}|\^\*)*
    (?P<argument>\s?\({_ARGUMENT}\)|\[{_ARGUMENT}\]|\([fghu-w]\({_ARGUMENT}\)\))?""",
    re.VERBOSE,
)
# A head that has a sum, a product or a power as its argument only if it is the usual name of a function, or a word.
_FUNCTION = re.compile(
    r"[fghEFGHPQ]|\\text.*|\\mathbb.*|(?![A-Z]+$|[a-z]{3}$)[A-Za-z\s]{3,}|\\(?:(?:var)?phi|psi|sigma|tau|mu|omega|zeta|[A-Z][a-z]+)"
    r"|\\(?:det|dim|deg|gcd|lcm|Pr)\b.*"
)
_ARITHMETIC = re.compile(r"[A-Za-z0-9}]\s*[+-]|[0-9]\s*[A-Za-z]|[A-Za-z]\s*\^\{?[0-9]|\\frac[0-9{}\s]*[A-Za-z]")
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_RATIO = re.compile(rf"\\frac{_GROUP}{_GROUP}|([^/]*)/(.*)", re.DOTALL)
_ANGLE = r"[2-9]?\s?(?:\\angle\s?[A-Z]{1,3}|[A-Z]|\\(?:alpha|beta|gamma|delta|theta|phi|psi|omega)(?![a-zA-Z]))"
# A derivative, a composition, and a function of an angle that has a name: `\sin x=7` is an equation to be solved.
_OTHER_NAME = re.compile(
    rf"\\frac\{{d\s?[a-z]?\}}\{{d\s?[a-z]\}}|\([A-Za-z]\s?\\circ\s?[A-Za-z]\)\([A-Za-z0-9+-]*\)|\\(?:{_ANGULAR})\s?"
    rf"(?:\^\{{?[2-9]\}}?\s?)?(?:\(?{_ANGLE}(?:\s?[+-]\s?{_ANGLE})*\)?|\(?\\frac\{{{_ANGLE}\}}\{{[2-9]\}}\)?)"
)
_FORMULA_WORD = re.compile(rf"\b(?:{'|'.join(ELEMENTARY)}|sqrt)\b")
# A letter without a value of its own (`e_1` has none, e and i have), or a segment; possessive, so linear on any text.
_SYMBOL = (
    rf"(?:[A-Z]++|(?![ei](?![_']))[a-z]|\\(?:{'|'.join(GREEK)})(?![a-zA-Z]))(?:_\{{[A-Za-z0-9]++\}}|_[A-Za-z0-9]|')*+"
)
_SUM_OR_PRODUCT = re.compile(rf"{_SYMBOL}(?:(?:\s?[+-]\s?{_SYMBOL})++|(?:\s?\*?\s?{_SYMBOL})++)")
# In small letters: `NO` is a segment.
_DENIAL = re.compile(r"\b(?:[Nn]ot?|[Nn]ever|[Nn]either|nor|isn't|cannot|false|wrong)\b")


def is_name(source: str) -> bool:
    r"""Whether a side of an equation only names what the other is: `x`, `T_{4}`, `f(x)`, `\text{Volume}`, `(x,y)`."""
    source = source.strip()
    if _OTHER_NAME.fullmatch(source):
        return True
    if source.startswith("(") and source.endswith(")"):
        return all(map(is_name, source[1:-1].split(",")))
    return all(_is_one_name(part.strip()) for part in source.split(":"))


def _is_one_name(part: str) -> bool:
    name = _NAME.fullmatch(part)
    if name is None or _FORMULA_WORD.search(part) or _DENIAL.search(part):
        return False
    return not name["argument"] or not _is_product(name["head"], name["argument"])


def _is_product(head: str, argument: str) -> bool:
    """Whether a bracket is a factor: `x(x+1)` and `a(b+c)` are products, `f(x+1)` and `P(A)` are names."""
    if re.fullmatch(r"\\?[A-Za-z]+", head):  # A quantity in its own argument, unless it is applied there: `f(f(2))`.
        symbols = [head] if head.startswith("\\") or len(head) > 3 else sorted(set(head))
        if all(re.search(rf"(?<![A-Za-z\\]){re.escape(symbol)}(?![A-Za-z(_])", argument) for symbol in symbols):
            return True
    return not _FUNCTION.fullmatch(head) and "," not in argument and bool(_ARITHMETIC.search(argument))


def head(source: str) -> str:
    r"""One spelling of a name: the length `|AB|` or `\overline{AB}` is `AB`, the measure `m\angle A` is `\angle A`."""
    key = string_key(source)
    key = re.sub(r"\|([A-Z]{2})\||\\overline\{([A-Z]{2})\}", lambda found: found[1] or found[2], key)
    return re.sub(r"^m(?=\\angle)|^(?:\\Pr|\\mathbb\{?P\}?)(?=\()|\\text\{([^{}]*)\}", _plain, key)


def _plain(found: re.Match[str]) -> str:
    return "" if found[0] == "m" else found[1] or "P"


def inverted(source: str) -> str | None:
    r"""The inverse of a quotient of two names: `\frac{CD}{AB}` for `\frac{AB}{CD}`; None for anything else."""
    found = re.fullmatch(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", source.strip())
    return rf"\frac{{{found[2]}}}{{{found[1]}}}" if found and _is_ratio(source) else None


def _is_ratio(source: str) -> bool:
    r"""Whether a side is the quotient of two names, each of one quantity: `\frac{NO}{BO}`, `AB/CD`."""
    ratio = _RATIO.fullmatch(source.strip())
    return ratio is not None and all(_is_one_name(name.strip()) for name in ratio.groups() if name is not None)


def _is_sum_or_product(source: str) -> bool:
    r"""Whether a side is a sum, a difference or a product of different names: `a+b+c`, `b-a`, `mn`, `AB*AC`.

    With a number or a power in it, as `2x+3y` and `x^2+y^2`, it is the side of a curve's equation.
    """
    source = source.strip()
    if not _SUM_OR_PRODUCT.fullmatch(source) or _FORMULA_WORD.search(source) or _DENIAL.search(source):
        return False
    symbols = re.findall(_SYMBOL, source)
    return len(set(symbols)) == len(symbols)


def named_sides(relation: Relation, said: Answer | None = None) -> list[bool]:
    """Of each side whether it only names the others; at least one side is always a value.

    A ratio of quantities is a name where there is no simpler one: the value of `x=a/b` is the ratio. So are sums and
    products where an equation is to say a number other than 0.

    Args:
        relation: a chain of sides.
        said: what the relation is to say, if that is known.
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


def distinct_names(answer: Many) -> bool:
    """Whether every member is a relation about a name of its own, so that a bare list must keep the order."""
    names = []
    for item in answer.items:
        sides = zip(item.sources, named_sides(item), strict=True) if isinstance(item, Relation) else ()
        names.append(next((string_key(source) for source, name in sides if name), ""))
    return len(names) > 1 and "" not in names and len(set(names)) == len(names)


def without_letters(answer: Answer) -> bool:
    """Whether an answer is a formula that is a number."""
    return isinstance(answer, Leaf) and answer.node is not None and not letters(answer.node)


def has_other_letters(side: Answer, name: Answer) -> bool:
    """Whether a side is a formula with letters, none of which is the name: `x=2x=12` says more than `x=12`."""
    if not isinstance(side, Leaf) or side.node is None or without_letters(side):
        return False
    symbol = isinstance(name, Leaf) and name.node is not None and name.node.kind == "symbol" and name.node.value
    return symbol not in letters(side.node)


def letters_of(relation: Relation) -> set[str]:
    """The symbols of all sides."""
    nodes = [side.node for side in relation.sides if isinstance(side, Leaf) and side.node is not None]
    return set[str]().union(*map(letters, nodes))

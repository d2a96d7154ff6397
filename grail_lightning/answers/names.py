"""Which side of an equation only names what the other side is."""

import re

from grail_lightning.answers.nodes import letters
from grail_lightning.answers.normalise import string_key
from grail_lightning.answers.structure import Answer, Leaf, Many, Relation

__all__ = ["bare_number", "distinct_names", "is_name", "letters_of", "named_value"]

_NAME = re.compile(
    r"""(?:m?\\(?:angle|triangle)\s?)?
    (?:\\text\{[A-Za-z][^{}]*\}|\\mathbb\{[A-Z]\}|\\overline\{[A-Z]{2}\}|\\(?:bar|hat|vec|tilde)\{[A-Za-z]\}|\|[A-Z]{2}\||\[[A-Z]{3,6}\]|[A-Z]{2,5}
      |[A-Za-z]{3,}(?:\s[A-Za-z]{3,})*|[A-Za-z]|\\(?!frac|sqrt|pi|infty|sin|cos|tan|cot|sec|csc|l[no]g?|exp|int|sum)[a-zA-Z]+)
    (?:'|_\{[^{}]*\}|_\\text\{[^{}]*\}|_[A-Za-z0-9]|\^\{-1\}|\^\*)*
    (?:\([A-Za-z0-9_,;|\s\\{}=+-]*\))?""",
    re.VERBOSE,
)
_DERIVATIVE = re.compile(r"\\frac\{d\s?[a-z]?\}\{d\s?[a-z]\}")
_FORMULA_WORD = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)\b")


def is_name(source: str) -> bool:
    r"""Whether a side of an equation only names what the other is: `x`, `T_{4}`, `f(x)`, `\text{Volume}`, `(x,y)`."""
    source = source.strip()
    if source.startswith("(") and source.endswith(")"):
        return all(is_name(part) for part in source[1:-1].split(","))
    parts = source.split(":")
    if _DERIVATIVE.fullmatch(source):
        return True
    return all(_NAME.fullmatch(part.strip()) and not _FORMULA_WORD.search(part) for part in parts)


def named_value(relation: Relation) -> Answer | None:
    """What a relation says of its name, or None if it is more than a name and a value."""
    if set(relation.signs) <= {"=", r"\in"} and is_name(relation.sources[0]):
        return relation.sides[-1]
    if relation.signs == ("=",) and is_name(relation.sources[1]):
        return relation.sides[0]
    return None


def _variable(relation: Relation) -> str:
    return next((string_key(source) for source in relation.sources if is_name(source)), "")


def distinct_names(answer: Many) -> bool:
    """Whether every member is a relation about a name of its own, so that a bare list must keep the order."""
    names = [_variable(item) if isinstance(item, Relation) else "" for item in answer.items]
    return len(names) > 1 and "" not in names and len(set(names)) == len(names)


def bare_number(relation: Relation) -> bool:
    """Whether the last side has no letters."""
    side = relation.sides[-1]
    return isinstance(side, Leaf) and side.node is not None and not letters(side.node)


def letters_of(relation: Relation) -> set[str]:
    """The symbols of all sides."""
    nodes = [side.node for side in relation.sides if isinstance(side, Leaf) and side.node is not None]
    return set[str]().union(*(letters(node) for node in nodes))

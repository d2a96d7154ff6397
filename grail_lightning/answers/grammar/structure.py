r"""From a normalised answer to its kind and its parts (`kinds`).

`read` cuts a normalised answer along its brackets and separators and leaves the formulas in the leaves to
`parser.parse`. It never guesses: what it cannot cut is `Broken`, and equal to nothing but the same string.
"""

import itertools
import math
import re
from functools import lru_cache

from grail_lightning.answers.grammar.brackets import CLOSING, TEXT, balanced, pieces, split
from grail_lightning.answers.grammar.functions import COMMON
from grail_lightning.answers.grammar.kinds import Answer, Broken, Group, Leaf, Many, Relation, Union, Words, members
from grail_lightning.answers.grammar.nodes import signed, subtrees
from grail_lightning.answers.grammar.normalise import CACHED_CHARACTERS
from grail_lightning.answers.grammar.parser import Unreadable, parse
from grail_lightning.answers.grammar.units import split_quantity

__all__ = ["read"]

_RELATIONS = [r"=", r"<", r">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv"]
_CONNECTIVE = re.compile(
    r",?\s*(?:\{?\\text\{\s*,?\s*(and|or)\s*,?\s*\}\}?|(?<![A-Za-z\\])(?<!\\text\{)(and|or)(?![A-Za-z}]))\s*,?",
    re.IGNORECASE,
)
_BASE = re.compile(
    r"[{(]?([0-9A-F]+(?:\.[0-9A-F]+)?)[})]?_(?:\{?\(?([0-9]{1,2})\)?\}?|\{?\\text\{([a-z]+)\}\}?)", re.ASCII
)
_BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_BASES = {name: str(base) for base, name in enumerate(_BASE_NAMES, 2)}
# The first digits of a number that goes on.
_CUT_OFF = re.compile(r"(?<=[0-9])\\ldots$")
_MATRIX = re.compile(
    r"(?P<factor>[^&]*?)\\begin\{(?P<kind>[pbBvV]?)(?:matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(?P<body>.*?)"
    r"\\end\{[pbBvV]?(?:matrix|array|smallmatrix)\}",
    re.DOTALL,
)
_BRACKETED_ARRAY = re.compile(
    r"[\[(]\\begin\{array\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*?)\\end\{array\}[\])]", re.DOTALL
)
# `\\[4pt]` is a line break with more space.
_ROW_END = re.compile(r"\\\\(?:\[[0-9.]+(?:pt|em|ex|mm|cm)\])?|\\cr")
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}\s+){2,}[A-Za-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z.]", re.ASCII)
_SYNONYMS = {
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], "none"),
    **dict.fromkeys(["dne", "undefined"], "does not exist"),
    **dict.fromkeys(
        ["infinitely many solutions", "infinite solutions", "infinite number of solutions"], "infinitely many"
    ),
    **dict.fromkeys(["all reals", "all real", "real numbers", "any real number"], "all real numbers"),
}
_SHORT_WORDS = ("yes", "no", "dne")
_FORMULA_WORDS = COMMON | {"sqrt"}
_NAMED_NUMBERS = r"(?:[A-Za-z]|\\[a-z]+|\((?:[A-Za-z](?:_\{?[0-9]\}?)?,?)+\))(?:_\{?[0-9A-Za-z]\}?)?"
_ANY_REAL = re.compile(rf"{_NAMED_NUMBERS}(?:\s*\\in\s*(?:\\mathbb\{{?R\}}?(?:\^\{{?[0-9n]\}}?)?))?")


def read(text: str) -> Answer:
    """The structure of a normalised answer.

    Args:
        text: what `normalise` returned.
    """
    return _of_short(text) if len(text) <= CACHED_CHARACTERS else _of_any(text)


def _of_any(text: str) -> Answer:
    return _read(text) if balanced(text) else Broken("brackets do not match")


_of_short = lru_cache(maxsize=1 << 12)(_of_any)


def _read(text: str) -> Answer:
    text = text.strip().strip("\x00")
    if not text:
        return Broken("nothing")
    for reader in (_words, _list, _relation, _set_operation, _bracketed, _matrix, _ratio, _base):
        answer = reader(text)
        if answer is not None:
            return answer
    return _leaf(text)


def _words(text: str) -> Words | None:
    written = TEXT.sub(r" \1 ", text)
    wrapped = written != text
    plain = re.sub(r"\s+", " ", written).strip().strip('"').rstrip(".!")
    if not _WORDS.fullmatch(plain) or re.search(r"\b(?:and|or)\b", plain):
        return None
    runs = re.findall(r"[A-Za-z]+", plain)
    longest = max(map(len, runs))
    short = longest < 2 or (longest < 4 and not wrapped and not (longest == 3 and len(runs) > 1))
    formula = plain.lower() in ("infinity", "infty") or not (wrapped or _FORMULA_WORDS.isdisjoint(runs))
    if (short or formula) and plain.lower() not in _SHORT_WORDS:
        return None
    lower = re.sub(r"^(?:the|an?) ", "", plain.lower())
    return Words(_SYNONYMS.get(lower, lower), plain)


def _list(text: str) -> Answer | None:
    """A list; a plus-minus inside of it stands for two of its members."""
    joints = {(found[1] or found[2]).lower() for found in _CONNECTIVE.finditer(text)}
    joint = joints.pop() if len(joints) == 1 else ","
    marked = _CONNECTIVE.sub("\x01", text)
    parts, _ = split(marked, [";", "\x01"])
    if len(parts) == 1 or joint != "," or not all(split(part, [","])[1] for part in parts if part.strip()):
        parts = [piece for part in parts for piece in split(part, [","])[0]]
    if len(parts) == 1:
        return None
    if marked.startswith("\x01") or marked.endswith("\x01"):
        return Broken("a list that begins or ends with its connective")
    items = [item for part in parts if part.strip() for item in members(_read(part))]
    return Many(tuple(items), joint=joint) if items else Broken("an empty list")


def _relation(text: str) -> Answer | None:
    parts, signs = split(text, _RELATIONS)
    if not signs:
        return None
    parts = [part.strip() for part in parts]
    if not all(parts):
        return Broken("a relation with a missing side")
    return Relation(tuple(map(_read, parts)), tuple(signs), tuple(parts))


def _set_operation(text: str) -> Answer | None:
    parts, signs = split(text, (r"\cup", r"\cap", r"\setminus"))
    return Union(tuple(map(_read, parts)), tuple(signs)) if signs else None


def _ratio(text: str) -> Answer | None:
    parts, signs = split(text, [":"])
    return Group(":", tuple(map(_read, parts))) if signs else None


def _bracketed(text: str) -> Answer | None:
    if text in (r"\emptyset", r"\{\}", "{}"):
        return Many((), braced=True)
    opening = re.match(r"[(\[{]|\\\{|\\langle(?![a-zA-Z])", text)
    if opening is None:
        return None
    closing = next((place for place, _, depth in pieces(text) if place and depth == 0), len(text))
    inner, closed = text[opening.end() : closing], text[closing:]
    if closed not in CLOSING:
        return None
    if opening[0] == "{" and closed == "}":
        return _read(inner)
    if opening[0] == r"\{":
        return _braces(inner) if closed == r"\}" else Broken("a set that closes with another bracket")
    return _group("()" if opening[0] == r"\langle" else opening[0] + closed, inner)


def _group(brackets: str, inner: str) -> Answer:
    parts, found = split(inner, [";"])
    if not found:
        parts, found = split(inner, [","])
    if not found:
        return _read(inner) if brackets in ("()", "[]") else Broken("an interval with one end")
    choices = [members(_read(part)) for part in parts]  # a plus-minus inside a tuple makes several
    if math.prod(map(len, choices)) > 8:
        return Broken("too many plus-minus signs")
    groups = [Group(brackets, choice) for choice in itertools.product(*choices)]
    return groups[0] if len(groups) == 1 else Many(tuple(groups))


def _braces(inner: str) -> Answer:
    for bar in (r"\mid", "|", ":"):
        parts, signs = split(inner, [bar])
        if len(parts) == 2 and signs and any(sign in parts[1] for sign in ("<", ">", r"\le", r"\ge", r"\ne", r"\in")):
            if _ANY_REAL.fullmatch(parts[0].strip()):
                return _read(parts[1])
            # What the members look like is part of the answer: the doubles of x > 1 are not the x > 1.
            return Group(":", tuple(map(_read, parts)))
    return Many(members(_read(inner)), braced=True)


def _matrix(text: str) -> Answer | None:
    found = _MATRIX.fullmatch(_BRACKETED_ARRAY.sub(r"\\begin{bmatrix}\1\\end{bmatrix}", text))
    if found is None:
        return None
    rows = [row.strip() for row in _ROW_END.split(found["body"]) if row.strip() not in ("", r"\hline")]
    factor = found["factor"].strip().removesuffix("*").strip()
    cells = [[f"{factor}({cell.strip()})" if factor else cell for cell in row.split("&")] for row in rows]
    if not rows or len({len(row) for row in cells}) != 1:
        return Broken("a matrix with rows of different lengths")
    kind = "determinant" if found["kind"] in ("v", "V") else "matrix"
    return Group(kind, tuple(Group("&", tuple(map(_read, row))) for row in cells))


def _base(text: str) -> Words | None:
    # `3\text{A}7_{16}`: a single letter keeps its upright type, or stands between spaces.
    joined = re.sub(r"\s*(?:\\text\{([A-F]+)\}|([A-F]))\s*", r"\1\2", text)
    found = _BASE.fullmatch(re.sub(r"(?<=[0-9])\s+(?=[0-9])", "", joined))
    base = found and (found[2] or _BASES.get(found[3] or ""))
    if not found or not base:
        return None
    digits = f"{found[1].lstrip('0') or '0'}_{base.lstrip('0')}"
    return Words(digits, digits)


def _leaf(text: str) -> Answer:
    quantity = split_quantity(text)
    if _PROSE.search(quantity.text):  # a sentence, not a product of its letters
        return Leaf(quantity, None)
    try:
        node = parse(_CUT_OFF.sub("", quantity.text))
    except Unreadable:
        return Leaf(quantity, None)
    if all(part.kind != "sign" for part in subtrees(node)):
        return Leaf(quantity, node)
    return Many(tuple(Leaf(quantity._replace(text=f"{quantity.text}[{sign}]"), signed(node, sign)) for sign in "+-"))

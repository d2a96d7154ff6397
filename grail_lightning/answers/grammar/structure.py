r"""From a normalised answer to its kind and its parts (`kinds`).

`read` cuts a normalised answer along its brackets and separators and leaves the formulas in the leaves to
`parser.parse`. It never guesses: what it cannot cut is `Broken`, and equal to nothing but the same string.
"""

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache

from grail_lightning.answers.grammar.brackets import CLOSING, balanced, pieces, split
from grail_lightning.answers.grammar.functions import COMMON
from grail_lightning.answers.grammar.kinds import (
    Answer,
    Base,
    Broken,
    Group,
    Leaf,
    Many,
    Matrix,
    Ratio,
    Relation,
    Union,
    Words,
)
from grail_lightning.answers.grammar.nodes import has_sign, signed
from grail_lightning.answers.grammar.normalise import CACHED_CHARACTERS
from grail_lightning.answers.grammar.parser import Unreadable, parse
from grail_lightning.answers.grammar.units import split_quantity

__all__ = ["read"]


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_RELATIONS = _set(r"= < > \le \ge \ne \in \approx \equiv")
_CONNECTIVE = re.compile(
    r",?\s*(?:\{?\\text\{\s*,?\s*(and|or)\s*,?\s*\}\}?|(?<![A-Za-z\\])(?<!\\text\{)(and|or)(?![A-Za-z}]))\s*,?",
    re.IGNORECASE,
)
_BASE = re.compile(r"\{?([0-9A-F]+(?:\.[0-9A-F]+)?)\}?_(?:\{?\(?([0-9]{1,2})\)?\}?|\{?\\text\{([a-z]+)\}\}?)", re.ASCII)
_BASES = {
    name: str(value)
    for value, name in enumerate(["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], 2)
}
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
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}\s+){2,}[A-Za-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z.]", re.ASCII)
_SYNONYMS = {
    **dict.fromkeys(
        ["no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"], "none"
    ),
    **dict.fromkeys(["does not exist", "dne", "undefined"], "does not exist"),
    **dict.fromkeys(
        ["all real numbers", "all reals", "all real", "real numbers", "any real number"], "all real numbers"
    ),
}


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
    readers = (_words, _list, _relation, _set_operation, _bracketed, _matrix, _ratio, _base)
    for reader in readers:
        answer = reader(text)
        if answer is not None:
            return answer
    return _leaf(text)


def _words(text: str) -> Words | None:
    written = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    wrapped = written != text
    plain = re.sub(r"\s+", " ", written).strip().strip('"').rstrip(".!")
    if not _WORDS.fullmatch(plain) or re.search(r"\b(?:and|or)\b", plain):
        return None
    runs = re.findall(r"[A-Za-z]+", plain)
    longest = max(map(len, runs))
    if plain.lower() in _SHORT_WORDS:
        return Words(_SYNONYMS.get(plain.lower(), plain.lower()), plain)
    if longest < 2 or (longest < 4 and not wrapped and not (longest == 3 and len(runs) > 1)):
        return None
    if plain.lower() in ("infinity", "infty") or (not wrapped and any(run in _FORMULA_WORDS for run in runs)):
        return None
    lower = re.sub(r"^(?:the|an?) ", "", plain.lower())
    return Words(_SYNONYMS.get(lower, lower), plain)


_SHORT_WORDS = _set("yes no dne")
_FORMULA_WORDS = COMMON | {"sqrt"}


def _list(text: str) -> Answer | None:
    marked, joint = _marked_connectives(text)
    parts, _ = split(marked, [";", "\x01"])
    if len(parts) == 1:
        parts, _ = split(marked, [","])
    elif all(split(part, [","])[1] for part in parts if part.strip()) is False or joint != ",":
        parts = [piece for part in parts for piece in split(part, [","])[0]]
    if len(parts) == 1:
        return None
    if marked.startswith("\x01") or marked.endswith("\x01"):
        return Broken("a list that begins or ends with its connective")
    parts = [part for part in parts if part.strip()]
    return Many(tuple(_flat(_read(part) for part in parts)), joint=joint) if parts else Broken("an empty list")


def _marked_connectives(text: str) -> tuple[str, str]:
    r"""The text with `and` and `or` as one separator character, and which of them it was."""
    joints = {(found[1] or found[2]).lower() for found in _CONNECTIVE.finditer(text)}
    joint = joints.pop() if len(joints) == 1 else ","
    return _CONNECTIVE.sub("\x01", text), joint


def _flat(items: Iterator[Answer]) -> Iterator[Answer]:
    """A plus-minus inside a list stands for two of its members."""
    for item in items:
        if isinstance(item, Many) and not item.braced:
            yield from item.items
        else:
            yield item


def _relation(text: str) -> Answer | None:
    parts, signs = split(text, _RELATIONS)
    if not signs:
        return None
    parts = [part.strip() for part in parts]
    if not all(parts):
        return Broken("a relation with a missing side")
    return Relation(tuple(_read(part) for part in parts), tuple(signs), tuple(parts))


def _set_operation(text: str) -> Answer | None:
    parts, signs = split(text, (r"\cup", r"\cap", r"\setminus"))
    return Union(tuple(_read(part) for part in parts), tuple(signs)) if signs else None


def _ratio(text: str) -> Answer | None:
    parts, signs = split(text, [":"])
    return Ratio(tuple(_read(part) for part in parts)) if signs else None


def _bracketed(text: str) -> Answer | None:
    if text in (r"\emptyset", r"\{\}", "{}"):
        return Many((), braced=True)
    opening = re.match(r"[(\[{]|\\\{|\\langle(?![a-zA-Z])", text)
    if opening is None:
        return None
    closing = _closing_place(text)
    if closing is None:
        return None
    inner, closed = text[opening.end() : closing], text[closing:]
    if opening[0] == "{" and closed == "}":
        return _read(inner)
    if opening[0] == r"\{":
        return _braces(inner) if closed == r"\}" else Broken("a set that closes with another bracket")
    return _group(opening[0], inner, closed)


def _closing_place(text: str) -> int | None:
    """Where the first bracket closes, if that is the end of the text."""
    for place, piece, depth in pieces(text):
        if place and depth == 0:
            return place if place + len(piece) == len(text) and piece in CLOSING else None
    return None


def _group(opening: str, inner: str, closed: str) -> Answer:
    separators = [";"] if split(inner, [";"])[1] else [","]
    parts = split(inner, separators)[0]
    brackets = "()" if opening == r"\langle" else opening + closed
    if len(parts) == 1:
        return _read(inner) if brackets in ("()", "[]") else Broken("an interval with one end")
    items = [_read(part) for part in parts]
    choices = [item.items if isinstance(item, Many) and not item.braced else (item,) for item in items]
    if any(len(choice) > 1 for choice in choices):  # plus-minus inside a tuple
        if len(list(itertools.islice(itertools.product(*choices), 9))) > 8:
            return Broken("too many plus-minus signs")
        return Many(tuple(Group(brackets, choice) for choice in itertools.product(*choices)))
    return Group(brackets, tuple(items))


_ANY_REAL = re.compile(
    r"(?:[A-Za-z]|\\[a-z]+|\((?:[A-Za-z](?:_\{?[0-9]\}?)?,?)+\))(?:_\{?[0-9A-Za-z]\}?)?(?:\s*\\in\s*(?:\\mathbb\{?R\}?(?:\^\{?[0-9n]\}?)?))?"
)


def _braces(inner: str) -> Answer:
    for bar in (r"\mid", "|", ":"):
        parts, signs = split(inner, [bar])
        if len(parts) == 2 and signs and any(sign in parts[1] for sign in ("<", ">", r"\le", r"\ge", r"\ne", r"\in")):
            if _ANY_REAL.fullmatch(parts[0].strip()):
                return _read(parts[1])
            # What the members look like is part of the answer: the doubles of x > 1 are not the x > 1.
            return Ratio((_read(parts[0]), _read(parts[1])))
    answer = _read(inner)
    if isinstance(answer, Many) and not answer.braced:
        return Many(answer.items, braced=True)
    return Many((answer,), braced=True)


def _matrix(text: str) -> Answer | None:
    found = _MATRIX.fullmatch(_BRACKETED_ARRAY.sub(r"\\begin{bmatrix}\1\\end{bmatrix}", text))
    if found is None:
        return None
    rows = [row.strip() for row in re.split(r"\\\\|\\cr", found["body"]) if row.strip() not in ("", r"\hline")]
    factor = found["factor"].strip().removesuffix("*").strip()
    cells = [[_scaled(factor, cell.strip()) for cell in row.split("&")] for row in rows]
    if not rows or len({len(row) for row in cells}) != 1:
        return Broken("a matrix with rows of different lengths")
    kind = found["kind"]
    return Matrix(tuple(tuple(row) for row in cells), "v" if kind in ("v", "V") else "m")


def _scaled(factor: str, cell: str) -> Answer:
    if not factor:
        return _read(cell)
    return _read(f"{factor}({cell})")


def _base(text: str) -> Answer | None:
    found = _BASE.fullmatch(text)
    if found is None:
        return None
    base = found[2] or _BASES.get(found[3] or "")
    return Base(found[1].lstrip("0") or "0", base.lstrip("0")) if base else None


def _leaf(text: str) -> Answer:
    quantity = split_quantity(text)
    if _PROSE.search(quantity.text):  # a sentence, not a product of its letters
        return Leaf(quantity, None)
    try:
        node = parse(_CUT_OFF.sub("", quantity.text))
    except (Unreadable, IndexError):
        return Leaf(quantity, None)
    if not has_sign(node):
        return Leaf(quantity, node)
    return Many(tuple(Leaf(quantity._replace(text=f"{quantity.text}[{sign}]"), signed(node, sign)) for sign in "+-"))

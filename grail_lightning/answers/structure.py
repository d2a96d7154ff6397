r"""From a normalised answer to its kind and its parts.

`read` cuts a normalised answer along its brackets and separators and leaves the formulas in the atoms to
`parse.parse`. It never guesses: what it cannot cut is `Broken`, and equal to nothing but the same string.
"""

import re
from functools import lru_cache

from grail_lightning.answers.normalise import CACHED_CHARACTERS, CLOSING, TEXT, balanced, pieces, split
from grail_lightning.answers.numerals import spelled
from grail_lightning.answers.parse import Node
from grail_lightning.answers.quantity import FUNCTION_WORDS, NOTHING, unwrapped
from grail_lightning.answers.shapes import (
    SET_SIGNS,
    Answer,
    Atom,
    Broken,
    Chain,
    Group,
    Many,
    Words,
    atom_of,
    compound,
    in_base,
    number_in_words,
    quotient_in_words,
)

_WORD = re.compile(r"[A-Za-z]+")


_RELATIONS = (r"=", r"<", r">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv")
_CONNECTIVE = re.compile(
    r",?\s*(?:\{?\\text\{\s*,?\s*(and|or)\s*,?\s*\}\}?|(?<![A-Za-z\\])(?<!\\text\{)(and|or)(?![A-Za-z}]))\s*,?",
    re.IGNORECASE,
)
_ARRAY = r"(?:matrix|array|smallmatrix)\}"
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_MATRIX = re.compile(
    rf"(?P<factor>[^&]*?)\\begin\{{(?P<kind>[pbBvV]?){_ARRAY}(?:\{{[lcr|]*\}})?(?P<body>.*?)\\end\{{[pbBvV]?{_ARRAY}",
    re.DOTALL,
)
_BRACKETED_ARRAY = re.compile(
    r"[\[(]\s*(\\begin\{((?:small)?matrix|array)\}(?:(?!\\begin).)*?\\end\{\2\})\s*[\])]", re.DOTALL
)
_TRANSPOSED = re.compile(
    r"\^\s*(?:T|\{\s*(?:\\text\{)?\s*(?:T|t|\\top|\\intercal)\s*\}{1,2}|\\top|\\intercal|\\text\{T\})$"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z.]", re.ASCII)
_SYNONYMS = {
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], "none"),
    **dict.fromkeys(["no roots", "no real roots"], "none"),
    **dict.fromkeys(["dne", "undefined"], "does not exist"),
    **{"equilateral triangle": "equilateral", "scalene triangle": "scalene"},
    **dict.fromkeys(["infinitely many solutions", "infinite solutions"], "infinitely many"),
}
_SHORT_WORDS = ("yes", "no", "dne")
_ANY_REAL = re.compile(r"[A-Za-z](?:\s*\\in\s*\\mathbb\{?R\}?)?")

# Characters of a factor, times the entries that it is written before.
_MOST_REPEATED = 10_000


@lru_cache(maxsize=1 << 12)
def _read_short(text: str) -> Answer:
    return _read(text) if balanced(text) else Broken("brackets do not match")


def read(text: str) -> Answer:
    """The structure of a normalised answer."""
    return _read_short(text) if len(text) <= CACHED_CHARACTERS else _read_short.__wrapped__(text)


def _read(text: str) -> Answer:
    text = text.strip()
    if not text:
        return Broken("nothing")
    for reader in (
        number_in_words,
        quotient_in_words,
        _words,
        compound,
        _list,
        _chain,
        _bracketed,
        _cases,
        _vectors,
        _matrix,
        _ratio,
        in_base,
    ):
        answer = reader(text)
        if answer is not None:
            return answer
    return atom_of(text)


def _words(text: str) -> Answer | None:
    wrapped = TEXT.search(text) is not None
    plain = unwrapped(text).strip('"').rstrip(".!")
    if not _WORDS.fullmatch(plain) or re.search(r"\b(?:and|or)\b", plain):
        return None
    runs = _WORD.findall(plain)
    longest = max(map(len, runs))
    short = longest < 2 or (longest < 4 and not wrapped and not (longest == 3 and len(runs) > 1))
    formula = plain.lower() in ("infinity", "infty") or not (wrapped or FUNCTION_WORDS.isdisjoint(runs))
    if (short or formula) and plain.lower() not in _SHORT_WORDS:
        return None
    lower = re.sub(r"^(?:the|an?) ", "", plain.lower())
    if lower in ("all real numbers", "all reals", "real numbers", "any real number", "every real number"):
        return Atom(r"\mathbb{R}", whole=text)
    if len(runs) == 2 and sorted(map(len, runs))[0] == 1:  # `odd n` and `n odd`
        lower = " ".join(sorted(lower.split(), key=len))
    return Words(_SYNONYMS.get(lower, lower))


def _members(answer: Answer) -> tuple[Answer, ...]:
    """The members of a list, and any other answer as the only member of one."""
    return answer.items if isinstance(answer, Many) and not answer.braced else (answer,)


def _list(text: str) -> Answer | None:
    """A list; a plus-minus inside of it stands for two of its members."""
    joints = {(match[1] or match[2]).lower() for match in _CONNECTIVE.finditer(text)}
    joint = joints.pop() if len(joints) == 1 else ","
    marked = _CONNECTIVE.sub("\x01", text)
    parts, _ = split(marked, [";", "\x01"])
    if len(parts) > 1 and joint != "and" and all(part.count("=") > 1 for part in parts):  # `x=1, y=2 or x=3, y=4`
        return Many(tuple(map(_read, parts)), joint=joint)
    if len(parts) == 1 or joint != "," or not all(split(part, [","])[1] for part in parts if part.strip()):
        parts = [piece for part in parts for piece in split(part, [","])[0]]
    if len(parts) == 1:
        return None
    if marked.startswith("\x01") or marked.endswith("\x01"):
        return Broken("a list that begins or ends with its connective")
    named = [equation for part in parts if part.strip() and (equation := _as_equation(part)) is not None]
    parts = named if len(named) == sum(bool(part.strip()) for part in parts) else parts
    items = [item for part in parts if part.strip() for item in _members(_read(part))]
    if isinstance(first := items[0], Chain) and first.signs == ("=",) and isinstance(names := first.items[0], Group):
        # `(m,n)=(3,5),(5,3)`: the names hold for all tuples
        items[1:] = [
            Chain((names, item), ("=",), (first.sources[0], ""))
            if isinstance(item, Group) and len(item.items) == len(names.items)
            else item
            for item in items[1:]
        ]
    if len(items) < 2:
        return items[0] if items else Broken("an empty list")
    return Many(tuple(items), joint=joint)


_NAMED = re.compile(
    r"\s*(?:\\text\{\s*([A-Za-z][A-Za-z ]+?)\s*:?\s*\}|([A-Za-z]{3,}(?: [A-Za-z]{3,})*)(?: |: ?))"
    r"\s*(\\?\$?[+-]?[0-9.].*)"
)


_PROSE_WORDS = FUNCTION_WORDS | {
    *[
        "between",
        "from",
        "not",
        "neither",
        "either",
        "both",
        "are",
        "is",
        "was",
        "only",
        "or",
        "and",
        "to",
        "than",
        "at",
        "by",
        "nor",
        "but",
    ]
}


def _as_equation(part: str) -> str | None:
    """`mean=3` for `mean 3`, a name with its value in a list; None for anything else."""
    match = _NAMED.fullmatch(part)
    words = (match[1] or match[2]).lower().split() if match else []
    if match is None or not _PROSE_WORDS.isdisjoint(words) or spelled(" ".join(words)):
        return None
    return rf"\text{{{match[1] or match[2]}}}={match[3]}"


def _chain(text: str) -> Answer | None:
    for separators in (_RELATIONS, SET_SIGNS):
        parts, signs = split(text, separators)
        if signs:
            parts = [part.strip() for part in parts]
            if not all(parts):
                return Broken("a relation with a missing side")
            return Chain(tuple(map(_read, parts)), tuple(signs), tuple(parts))
    return None


def _ratio(text: str) -> Answer | None:
    parts, signs = split(text, [":"])
    return Group(":", tuple(map(_read, parts))) if signs else None


def _bracketed(text: str) -> Answer | None:
    if text in (r"\emptyset", r"\{\}", "{}"):
        return Many((), braced=True)
    opening = re.match(r"[(\[{]|\\\{", text)
    if opening is None:
        return None
    closing = next((place for place, _, depth in pieces(text) if place and depth == 0), len(text))
    inner, closed = text[opening.end() : closing], text[closing:]
    pair = opening[0] + closed[:1] in ("()", "[]")
    if pair and _TRANSPOSED.fullmatch(closed[1:]) and split(inner, [","])[1]:
        return _bracketed(f"({inner})")  # `(1,2)^T`: a column is a tuple here
    if closed not in CLOSING:
        return None
    if opening[0] == "{" and closed == "}":
        return _read(inner)
    if opening[0] == r"\{":
        return _braces(inner) if closed == r"\}" else Broken("a set that closes with another bracket")
    parts, signs = split(inner, [";" if split(inner, [";"])[1] else ","])
    if signs and r"\mp" in inner and _PLUS_MINUS.search(inner):  # Two answers: the signs of both kinds are opposite.
        readings = (_PLUS_MINUS.sub(sign, inner).replace(r"\mp", other) for sign, other in ("+-", "-+"))
        return Many(tuple(_read(f"{opening[0]}{reading}{closed}") for reading in readings))
    if signs:
        return Group(opening[0] + closed, tuple(map(_read, parts)))
    return _read(inner) if opening[0] + closed in ("()", "[]") else Broken("an interval with one end")


def _braces(inner: str) -> Answer:
    for bar in (r"\mid", "|", ":"):
        parts, signs = split(inner, [bar])
        if len(parts) == 2 and signs and any(sign in parts[1] for sign in ("<", ">", r"\le", r"\ge", r"\ne", r"\in")):
            if _ANY_REAL.fullmatch(parts[0].strip()):
                return _read(parts[1])
            # What the members look like is part of the answer: the doubles of x > 1 are not the x > 1.
            return Group(":", tuple(map(_read, parts)))
    return Many(_members(_read(inner)), braced=True)


_MULTIPLE = re.compile(r"-?(?:[0-9./]+|\\frac\{[0-9]+\}\{[0-9]+\})\(")


def _vectors(text: str) -> Answer | None:
    """A sum of tuples or matrices with factors, `(1,2)+t(3,4)`, as one."""
    if "+" not in text and "-" not in text[1:]:
        return _vector(text, "+") if _MULTIPLE.match(text) else None
    parts, signs = split(text, ["+", "-"])
    if not parts[0].strip():
        parts, signs = parts[1:], signs
    else:
        signs = ["+", *signs]
    if len(parts) < 2 or len(parts) > 8 or not all(re.search(r",.*[)\]]|matrix", part) for part in parts):
        return None
    terms = [_vector(part, sign) for part, sign in zip(parts, signs, strict=True)]
    first = terms[0]
    if first is None or any(term is None or term.brackets != first.brackets for term in terms):
        return None
    return _summed([term for term in terms if term is not None])


def _vector(part: str, sign: str) -> Group | None:
    r"""A factor and a tuple, `2t(3,4)`, as a tuple; a matrix reads its factor itself."""
    part = part.strip()
    match = re.fullmatch(r"(?P<factor>[^()\[\],]*?)\*?(?P<tuple>\(.*\))", part)
    if match is None:
        answer = _matrix(f"-{part}" if sign == "-" else part)
        return answer if isinstance(answer, Group) and answer.brackets == "matrix" else None
    answer = _bracketed(match["tuple"])
    if not isinstance(answer, Group) or answer.brackets != "()":
        return None
    factor = sign.replace("+", "") + (match["factor"].strip() or "1")
    if len(factor) * len(answer.items) > _MOST_REPEATED:
        return None
    items = [atom_of(f"{factor}*({item.whole})") if isinstance(item, Atom) else item for item in answer.items]
    return Group("()", tuple(items))


def _summed(groups: list[Group]) -> Group | None:
    """The sum of tuples, or of matrices, of one shape."""
    if len({len(group.items) for group in groups}) != 1:
        return None
    items: list[Answer] = []
    for column in zip(*(group.items for group in groups), strict=True):
        rows = [item for item in column if isinstance(item, Group)]
        if rows:
            row = _summed(rows) if len(rows) == len(column) else None
            if row is None:
                return None
            items.append(row)
            continue
        atoms = [item for item in column if isinstance(item, Atom)]
        nodes = [atom.node for atom in atoms if atom.node is not None and atom.said == NOTHING]
        if len(nodes) < len(column):
            return None
        items.append(Atom("+".join(atom.text for atom in atoms), node=Node("add", "", tuple(nodes))))
    return Group(groups[0].brackets, tuple(items))


_CASES = re.compile(r"\\begin\{cases\}(.*?)\\end\{cases\}", re.DOTALL)
_IF = re.compile(r"^\s*(?:\\text\{\s*(?:,\s*)?(?:if|for|when|where)\s*\}|(?:if|for|when|where)\b)\s*")


def _cases(text: str) -> Answer | None:
    """A function by cases: pairs of a value and its condition."""
    match = _CASES.fullmatch(text) if text.startswith(r"\begin{cases}") else None
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[1]) if row.strip()]
    if any(len(row) != 2 for row in rows):
        return None
    cells = [(value.strip(" ,;"), _IF.sub("", condition).strip(" ,;.")) for value, condition in rows]
    return Group("cases", tuple(Group("&", (_read(value), _read(condition))) for value, condition in cells))


def _matrix(text: str) -> Answer | None:
    if text.startswith((r"\det\begin", r"\det(\begin")):
        inner = _matrix(text[4:].removeprefix("(").removesuffix(")"))
        return inner._replace(brackets="determinant") if isinstance(inner, Group) else None
    plain = _BRACKETED_ARRAY.sub(r"\1", text)
    transposed = _TRANSPOSED.search(plain)
    matrix = _MATRIX.fullmatch(plain[: transposed.start()].rstrip() if transposed else plain)
    if matrix is None:
        return None
    rows = [row.strip() for row in re.split(r"\\\\|\\cr", matrix["body"]) if row.strip() not in ("", r"\hline")]
    factor = matrix["factor"].strip().removesuffix("*").strip()
    cells = [row.split("&") for row in rows]
    if len(factor) * sum(map(len, cells)) > _MOST_REPEATED:
        return Broken("a long factor of many entries")
    cells = [[f"{factor}({cell.strip()})" if factor else cell for cell in row] for row in cells]
    if not rows or len({len(row) for row in cells}) != 1:
        return Broken("a matrix with rows of different lengths")
    cells = [list(column) for column in zip(*cells, strict=True)] if transposed else cells
    if len(cells) == len(cells[0]) == 1 and not matrix["kind"]:
        return _read(cells[0][0])
    kind = "determinant" if matrix["kind"] in ("v", "V") else "matrix"
    return Group(kind, tuple(Group("&", tuple(map(_read, row))) for row in cells))

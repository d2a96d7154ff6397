r"""From a normalised answer to its kind and its parts.

`read` cuts a normalised answer along its brackets and separators and leaves the formulas in the leaves to
`parse.parse`. It never guesses: what it cannot cut is `Broken`, and equal to nothing but the same string.
"""

import re
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from grail_lightning.answers.normalise import (
    CACHED_CHARACTERS,
    CLOSING,
    ELEMENTARY,
    TEXT,
    TRIGONOMETRIC,
    TYPED_UNITS,
    UNITS,
    balanced,
    pieces,
    split,
)
from grail_lightning.answers.parse import Node, Unreadable, parse, signed, subtrees

# Words that make another statement of a number than its bare value.
_STOP_WORDS = (
    "or and not no none never if when where is are was only but either neither minus plus times over more less than "
    "least most about approximately nearly almost around between through except without to so then unless some any "
    "all many few several with from by mod modulo base choose squared cubed half double twice hundred thousand "
    "million billion trillion quadrillion lakh crore tens hundreds thousands millions billions trillions tenth tenths "
    "dozen dozens halves thirds root pi octal binary hexadecimal incorrect "
    "cannot impossible excluded rejected ruled factorial remainder fourths fifths sixths eighths below above "
    "hundredth hundredths thousandth thousandths millionth millionths "
    "wrong false true unknown undefined repeating recurring percent pct"
)
_STOP = frozenset(_STOP_WORDS.split())
_FUNCTION_WORDS = frozenset([*ELEMENTARY, *"sqrt pi max gcd lcm lim det arg mod inf infty".split()])  # noqa: SIM905

_UNIT = re.compile(r"\s*\\text\{([A-Za-z\s./^0-9²³*\\-]*)\}(?:\s*\^\{?\s*(-?[1-9])\s*\}?)?\s*$")
_NUMBER_IN_UNIT = re.compile(r"(?<!\^)(?<!\^-)(?:[0-9](?!\s*[A-Za-z])|(?<=\s)[0-9])")
_FACTOR = re.compile(r"([a-z]+)\.?(?:\^\{?(-?[1-9])\}?)?")
_POWER_WORD = re.compile(r"\s*(square|sq|cubic)\.?\s")
# What may stand beside another unit without a sign between them: `kg m`, but `miles north` is no product.
_SYMBOLS = frozenset("m cm km mm ft s min h g kg mg l ml j n w v hz pa rad".split())  # noqa: SIM905
# What else is a product of other units.
_DERIVED = {
    **{"j": "kg*m^2*s^-2", "n": "kg*m*s^-2", "w": "kg*m^2*s^-3", "pa": "kg*m^-1*s^-2"},
    **{"hz": "s^-1", "mph": "mi*h^-1"},
}
# `\text{ft}/s`: a single letter loses its `\mathrm` when it is normalised.
_PER = re.compile(r"(?<=\})\s*/\s*([a-zA-Z]{1,3})(?=(?:\^\{?[0-9]\}?)?$)")
_BARE_UNIT = re.compile(r"(?<=[0-9}\)])(?:\s*([A-Za-z]{2,})| ([A-Za-z]{4,}|[A-Za-z]{3,}(?: [A-Za-z]{3,})+))$")
# `5 km/h`, `6 sq ft` and `16 cm^2` without a type. Of single letters `m/s` alone is a unit, for `2 h/g` is a formula.
_BARE_DERIVED = re.compile(
    r"(?:(?<=[0-9}\)])|(?<=\\pi)) (?:m/s|[A-Za-z]+(?:\^[23])?/[A-Za-z]{2,}|[A-Za-z]{2,}(?:\^[23])?/[A-Za-z]"
    r"|sq\.? [a-z]+|(?:[ckm]m|ft|in|yd)(?=\^))(?:\^[23])?$"
)
_DEGREES = re.compile(r"\s*\^\{?\s*\\circ\s*\}?\s*(?:\\text\{([CF])\}|([CF]))?\s*$|\s*\\text\{\s*deg(?:rees?)?\s*\}$")
_PERCENT = re.compile(r"\s*(?:%|\\text\{\s*(?:percent|pct)\.?\s*\}|(?<![A-Za-z])(?:percent|pct)\.?)\s*$")
_WORD = re.compile(r"[A-Za-z]+")
# The angle in `\sin 30^\circ` has the degrees, not the answer.
_OF_ANGLE = re.compile(rf"\\(?:{'|'.join(TRIGONOMETRIC)})")


class Atom(NamedTuple):
    """One formula (`text`) without what surrounds it; `node` is None if the grammar does not cover it.

    The unit is such as `cm^2` and `m*s^-1`, or `?apples` for one that is not known; `whole` has it as it was typed.
    """

    text: str
    unit: str = ""
    percent: bool = False
    degrees: bool = False
    node: Node | None = None
    whole: str = ""


def _quantity(text: str) -> Atom:
    r"""Take units, currency, percent and degrees off a normalised formula."""
    money = re.match(r"([+-]?)\s*\\\$\s*", text)
    bare = re.sub(r"\s*\\\$$", "", money[1] + text[money.end() :] if money else text)
    if r"\text" in bare:
        bare = _PER.sub(lambda per: rf"/\text{{{per[1]}}}" if per[1] in TYPED_UNITS else per[0], bare)
    elif (words := _BARE_UNIT.search(bare)) and _FUNCTION_WORDS.isdisjoint(words[0].split()):
        alone = words[1] and words[1].lower() not in UNITS and not (words[0][0] == " " and len(words[1]) > 3)
        bare = bare if alone else rf"{bare[: words.start()]}\text{{{words[0]}}}"
    elif (unit := _BARE_DERIVED.search(bare)) and {*_WORD.findall(unit[0].lower())} - {"sq"} <= UNITS.keys():
        bare = rf"{bare[: unit.start()]}\text{{{unit[0]}}}"
    quantity = Atom(bare, unit="dollar" if money else "")
    for _ in range(6):
        shorter = _without_suffix(quantity)
        if shorter is None or not shorter.text or shorter.text[-1] in "+-*^=<>(":
            break
        quantity = shorter
    return quantity._replace(unit=_in_order(quantity.unit), whole=bare)


def _without_suffix(quantity: Atom) -> Atom | None:
    text = quantity.text
    if percent := _PERCENT.search(text):
        return quantity._replace(text=text[: percent.start()], percent=True)
    if (degrees := _DEGREES.search(text)) and not _OF_ANGLE.search(text):
        scale = degrees[1] or degrees[2] or ""
        return quantity._replace(text=text[: degrees.start()], degrees=True, unit=f"{scale}*{quantity.unit}")
    suffix = _UNIT.search(text)
    words = [word.lower() for word in _WORD.findall(suffix[1])] if suffix else []
    if suffix is None or len(words) > 5 or not _STOP.isdisjoint(words) or _NUMBER_IN_UNIT.search(suffix[1]):
        return None
    rest, source = text[: suffix.start()].rstrip(), suffix[1].strip() + (f"^{suffix[2]}" if suffix[2] else "")
    if rest.endswith("/"):
        rest, source = rest[:-1].rstrip(), f"/{source}"
    return quantity._replace(text=rest, unit=f"{_canonical(source.lower())}*{quantity.unit}")


def _canonical(source: str) -> str:
    """The factors of a unit, such as `cm^3*s^-1`; `?` and its words if it is not known, as of `miles north`."""
    factors, words = [], _WORD.findall(source)
    for place, part in enumerate(source.split("/") if words else ()):
        in_words = _POWER_WORD.match(part)
        pieces = re.split(r"[\s*]+", part[in_words.end() if in_words else 0 :].strip())
        for piece in pieces:
            factor = _FACTOR.fullmatch(piece)
            side_by_side = len(pieces) > 1 and "*" not in part
            if factor is None or factor[1] not in (_SYMBOLS if side_by_side else TYPED_UNITS):
                return f"?{' '.join(words)}"
            power = factor[2] or ("1" if not in_words else "3" if in_words[1] == "cubic" else "2")
            factors.append(f"{TYPED_UNITS[factor[1]]}^{int(power) * (-1 if place else 1)}")
    return "*".join(factors)


def _in_order(unit: str) -> str:
    """A unit with each factor once, in the order of their names."""
    powers = Counter[str]()
    for factor in filter(None, unit.split("*")):
        name, _, power = factor.partition("^")
        for part in _DERIVED.get(name, name).split("*"):
            base, _, own = part.partition("^")
            powers[base] += int(power or 1) * int(own or 1)
    return "*".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()) if power)


class Group(NamedTuple):
    """Ordered items and what holds them: two brackets, `:` a ratio, `&` a row, `matrix` and `determinant` rows."""

    brackets: str
    items: tuple["Answer", ...]


class Many(NamedTuple):
    """Several answers in no order; `braced` if written as a set, `joint` is `and`, `or` or a comma."""

    items: tuple["Answer", ...]
    braced: bool = False
    joint: str = ","


class Chain(NamedTuple):
    r"""Items with signs between them, such as `1<x\le 3` or `A\cup B`; `sources` are the items as text."""

    items: tuple["Answer", ...]
    signs: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def is_relation(self) -> bool:
        """Whether it is a statement, not a set."""
        return _SET_SIGNS.isdisjoint(self.signs)


class Words(NamedTuple):
    """What is compared as text: words in lower case, and digits in a number base."""

    text: str


class Broken(NamedTuple):
    """An answer that cannot be read."""

    reason: str


Answer = Atom | Group | Many | Chain | Words | Broken

_RELATIONS = (r"=", r"<", r">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\equiv")
_SET_SIGNS = frozenset([r"\cup", r"\cap", r"\setminus"])
_CONNECTIVE = re.compile(
    r",?\s*(?:\{?\\text\{\s*,?\s*(and|or)\s*,?\s*\}\}?|(?<![A-Za-z\\])(?<!\\text\{)(and|or)(?![A-Za-z}]))\s*,?",
    re.IGNORECASE,
)
_BASE = re.compile(r"[{(]?([0-9A-F]+(?:\.[0-9A-F]+)?)[})]?_(?:\{?\(?([0-9]{1,2})\)?\}?)", re.ASCII)
# The first digits of a number that goes on.
_CUT_OFF = re.compile(r"(?<=[0-9])\\ldots$")
_ARRAY = r"(?:matrix|array|smallmatrix)\}"
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_MATRIX = re.compile(
    rf"(?P<factor>[^&]*?)\\begin\{{(?P<kind>[pbBvV]?){_ARRAY}(?:\{{[lcr|]*\}})?(?P<body>.*?)\\end\{{[pbBvV]?{_ARRAY}",
    re.DOTALL,
)
_BRACKETED_ARRAY = re.compile(r"[\[(](\\begin\{array\}(?:(?!\\begin).)*?\\end\{array\})[\])]", re.DOTALL)
_PROSE = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}\s+){2,}[A-Za-z]{2,}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'\- ]*[A-Za-z.]", re.ASCII)
_SYNONYMS = {
    **dict.fromkeys(["no solution", "no solutions", "no real solution", "no real solutions", "empty set"], "none"),
    **dict.fromkeys(["no roots", "no real roots"], "none"),
    **dict.fromkeys(["dne", "undefined"], "does not exist"),
    **dict.fromkeys(["infinitely many solutions", "infinite solutions"], "infinitely many"),
}
_SHORT_WORDS = ("yes", "no", "dne")
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_ANY_REAL = re.compile(r"[A-Za-z](?:\s*\\in\s*\\mathbb\{?R\}?)?")


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
    for reader in (_words, _list, _chain, _bracketed, _matrix, _ratio, _base):
        answer = reader(text)
        if answer is not None:
            return answer
    return _leaf(text)


def _words(text: str) -> Answer | None:
    written = TEXT.sub(r" \1 ", text)
    wrapped = written != text
    plain = re.sub(r"\s+", " ", written).strip().strip('"').rstrip(".!")
    if not _WORDS.fullmatch(plain) or re.search(r"\b(?:and|or)\b", plain):
        return None
    if plain.lower() in _NUMBER_WORDS:
        return _leaf(str(_NUMBER_WORDS.index(plain.lower())))
    runs = _WORD.findall(plain)
    longest = max(map(len, runs))
    short = longest < 2 or (longest < 4 and not wrapped and not (longest == 3 and len(runs) > 1))
    formula = plain.lower() in ("infinity", "infty") or not (wrapped or _FUNCTION_WORDS.isdisjoint(runs))
    if (short or formula) and plain.lower() not in _SHORT_WORDS:
        return None
    lower = re.sub(r"^(?:the|an?) ", "", plain.lower())
    return Words(_SYNONYMS.get(lower, lower))


def _members(answer: Answer) -> tuple[Answer, ...]:
    """The members of a list, and any other answer as the only member of one."""
    return answer.items if isinstance(answer, Many) and not answer.braced else (answer,)


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
    items = [item for part in parts if part.strip() for item in _members(_read(part))]
    if len(items) < 2:
        return items[0] if items else Broken("an empty list")
    return Many(tuple(items), joint=joint)


def _chain(text: str) -> Answer | None:
    for known in (_RELATIONS, _SET_SIGNS):
        parts, signs = split(text, known)
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


def _matrix(text: str) -> Answer | None:
    matrix = _MATRIX.fullmatch(_BRACKETED_ARRAY.sub(r"\1", text))
    if matrix is None:
        return None
    rows = [row.strip() for row in re.split(r"\\\\|\\cr", matrix["body"]) if row.strip() not in ("", r"\hline")]
    factor = matrix["factor"].strip().removesuffix("*").strip()
    cells = [[f"{factor}({cell.strip()})" if factor else cell for cell in row.split("&")] for row in rows]
    if not rows or len({len(row) for row in cells}) != 1:
        return Broken("a matrix with rows of different lengths")
    kind = "determinant" if matrix["kind"] in ("v", "V") else "matrix"
    return Group(kind, tuple(Group("&", tuple(map(_read, row))) for row in cells))


def _base(text: str) -> Words | None:
    digits = _BASE.fullmatch(re.sub(r"(?<=[0-9])\s+(?=[0-9])", "", text))
    return Words(f"{digits[1].lstrip('0') or '0'}_{digits[2].lstrip('0')}") if digits else None


def _leaf(text: str) -> Answer:
    leaf = _quantity(text)
    if _PROSE.search(leaf.text):  # a sentence, not a product of its letters
        return leaf
    try:
        node = parse(_CUT_OFF.sub("", leaf.text))
    except Unreadable:
        return leaf
    if all(part.kind != "sign" for part in subtrees(node)):
        return leaf._replace(node=node)
    return Many(tuple(leaf._replace(text=f"{leaf.text}[{sign}]", node=signed(node, sign)) for sign in "+-"))

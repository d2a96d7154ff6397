r"""Values with names: `(m,n)=(3,5)`, `x=1, y=2` and `A(1,2)` as maps from names to values."""

import re
from collections.abc import Sequence

from grail_lightning.answers.normalise import string_key
from grail_lightning.answers.relations import named_sides
from grail_lightning.answers.shapes import Answer, Atom, Chain, Group, Many
from grail_lightning.answers.structure import read

_NAME_IN_TUPLE = re.compile(
    r"\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?'?|\\text\{[A-Za-z ]+\}|\\(?:hat|bar|vec)\{?[A-Za-z]\}?"
)
_LABELLED = re.compile(r"(?:\\text\{)?\s*([A-Z](?:_\{?[0-9]\}?)?'?)\s*\}?\s*(\(.*\))")


def name_key(source: str) -> str:
    r"""A name without its type: `\text{mean}` is `mean`."""
    bare = re.sub(r"\\(?:text|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", source)
    return string_key(bare.strip()).lower() if len(bare.strip()) > 2 and bare.strip().isalpha() else string_key(bare)


def named_values(answer: Answer) -> dict[str, Answer] | None:
    """The value of each of several names; None for any other answer, and where a name stands twice."""
    match answer:
        case Chain(items=(Group(brackets="()", items=names), Group(brackets="()", items=values)), signs=("=",)):
            if len(names) == len(values) and all(
                isinstance(name, Atom) and _NAME_IN_TUPLE.fullmatch(name.text) for name in names
            ):
                return _map([name.whole if isinstance(name, Atom) else "" for name in names], values)
        case Many(items=items, joint="," | "and", braced=False) | Group(brackets="()", items=items):
            relations = [
                item for item in items if isinstance(item, Chain) and item.signs == ("=",) and named_sides(item)[0]
            ]
            if len(relations) == len(items):
                tuples = [named_values(item) for item in relations]
                if not any(tuples):
                    return _map([item.sources[0] for item in relations], [item.items[1] for item in relations])
    return None


def _map(names: Sequence[str], values: Sequence[Answer]) -> dict[str, Answer] | None:
    keys = [name_key(name) for name in names]
    return dict(zip(keys, values, strict=True)) if len({*keys}) == len(keys) > 1 else None


def by_axis(named: dict[str, Answer]) -> list[Answer]:
    """The values in their order. Those of coordinates are sorted by these: `y=2, x=1` is the point `(1,2)`."""
    names = sorted(named) if named.keys() <= {*"xyz"} else [*named]
    return [named[name] for name in names]


def unnamed_items(answer: Answer) -> Sequence[Answer] | None:
    """The members of a tuple or a list in order, if none of them is a relation."""
    if (isinstance(answer, Group) and answer.brackets == "()") or (
        isinstance(answer, Many) and not answer.braced and answer.joint != "or"
    ):
        return None if any(isinstance(item, Chain) for item in answer.items) else answer.items
    return None


def labelled(answer: Answer) -> tuple[str, Answer] | None:
    """The label of a point and the point, `A(1,2)`, and so `A=(1,2)`."""
    if isinstance(answer, Atom) and (match := _LABELLED.fullmatch(answer.whole)) is not None:
        point = read(match[2])
        return (string_key(match[1]), point) if isinstance(point, Group) and point.brackets == "()" else None
    if isinstance(answer, Chain) and answer.signs == ("=",) and isinstance(answer.items[1], Group):
        return (
            (string_key(answer.sources[0]), answer.items[1])
            if re.fullmatch(r"[A-Z](?:_[0-9])?'?", string_key(answer.sources[0]))
            else None
        )
    return None

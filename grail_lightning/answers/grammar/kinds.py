"""What kind of thing an answer is: a formula, a tuple, a set, an interval, a relation, a ratio, a matrix, a word."""

from dataclasses import dataclass

from grail_lightning.answers.grammar.nodes import Node
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Answer", "Base", "Broken", "Group", "Leaf", "Many", "Matrix", "Ratio", "Relation", "Union", "Words"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One formula; `node` is None if the grammar does not cover it."""

    quantity: Quantity
    node: Node | None


@dataclass(frozen=True, slots=True)
class Group:
    """A tuple or an interval: its brackets and two or more ordered items."""

    brackets: str
    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers in no order; `braced` if written as a set, `joint` is `and`, `or` or a comma."""

    items: tuple["Answer", ...]
    braced: bool = False
    joint: str = ","


@dataclass(frozen=True, slots=True)
class Relation:
    r"""A chain such as `1<x\le 3`: sides and the signs between them; `sources` are the sides as text."""

    sides: tuple["Answer", ...]
    signs: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Union:
    r"""Sets joined by `\cup`, `\cap` or `\setminus`."""

    parts: tuple["Answer", ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """`3:4`, also a time of day."""

    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Base:
    """Digits in a number base."""

    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries; a factor before it is multiplied in. `kind` is `v` for a determinant."""

    rows: tuple[tuple["Answer", ...], ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, lower case."""

    text: str
    exact: str


@dataclass(frozen=True, slots=True)
class Broken:
    """An answer that cannot be read."""

    reason: str


Answer = Leaf | Group | Many | Relation | Union | Ratio | Base | Matrix | Words | Broken

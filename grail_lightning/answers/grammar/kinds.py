"""What kind of thing an answer is: a formula, a tuple, an interval, a set, a relation, a ratio, a matrix, words."""

from typing import NamedTuple

from grail_lightning.answers.grammar.nodes import Node
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Answer", "Broken", "Group", "Leaf", "Many", "Relation", "Union", "Words", "members"]


class Leaf(NamedTuple):
    """One formula; `node` is None if the grammar does not cover it."""

    quantity: Quantity
    node: Node | None


class Group(NamedTuple):
    """Ordered items and what holds them: two brackets, `:` a ratio, `&` a row, `matrix` and `determinant` rows."""

    brackets: str
    items: tuple["Answer", ...]


class Many(NamedTuple):
    """Several answers in no order; `braced` if written as a set, `joint` is `and`, `or` or a comma."""

    items: tuple["Answer", ...]
    braced: bool = False
    joint: str = ","


class Relation(NamedTuple):
    r"""A chain such as `1<x\le 3`: sides and the signs between them; `sources` are the sides as text."""

    sides: tuple["Answer", ...]
    signs: tuple[str, ...]
    sources: tuple[str, ...]


class Union(NamedTuple):
    r"""Sets joined by `\cup`, `\cap` or `\setminus`."""

    parts: tuple["Answer", ...]
    signs: tuple[str, ...]


class Words(NamedTuple):
    """What is compared as text: words, in lower case and as written, and digits in a number base."""

    text: str
    exact: str


class Broken(NamedTuple):
    """An answer that cannot be read."""

    reason: str


Answer = Leaf | Group | Many | Relation | Union | Words | Broken


def members(answer: Answer) -> tuple[Answer, ...]:
    """The members of a list, and any other answer as the only member of one."""
    return answer.items if isinstance(answer, Many) and not answer.braced else (answer,)

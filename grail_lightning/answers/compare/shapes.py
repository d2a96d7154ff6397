"""Small questions about the structure of one answer."""

from grail_lightning.answers.grammar.kinds import Answer, Group, Many, Matrix, Relation

__all__ = ["joined_alike", "unwrapped", "vector"]

_ORDER = frozenset(["<", ">", r"\le", r"\ge"])


def joined_alike(one: Many, two: Many) -> bool:
    """Whether two lists may be compared by members: `x<1 and x>3` is not `x<1 or x>3`, though `1 and 3` is `1 or 3`."""
    bounds = any(isinstance(item, Relation) and _ORDER & set(item.signs) for item in one.items)
    return not bounds or {one.joint, two.joint} != {"and", "or"}


def unwrapped(answer: Answer) -> Answer:
    """The one member of a collection of one."""
    alone = isinstance(answer, Many) and len(answer.items) == 1 and not isinstance(answer.items[0], Many)
    return answer.items[0] if alone and isinstance(answer, Many) else answer


def vector(answer: Answer) -> tuple[Answer, ...] | None:
    """The entries of a tuple, or of a matrix of one row or one column."""
    if isinstance(answer, Matrix) and answer.kind == "m":
        if len(answer.rows) == 1:
            return answer.rows[0]
        return tuple(row[0] for row in answer.rows) if all(len(row) == 1 for row in answer.rows) else None
    return answer.items if isinstance(answer, Group) and answer.brackets == "()" else None

r"""Are two answers equal? Layers, cheapest first; each acceptance names the layer that made it.

`string`: the same after `normalise`. `number`: equal rational values. `structure`: tuples, sets, intervals, relations,
ratios, bases, matrices, words whose parts are equal. `symbolic`: formulas that agree at random points to a hundred
digits. `math-verify`: what the own grammar does not cover. The first three run in the caller's process: string and
Fraction work under caps. The last two are slow and run in a worker; unless they are allowed, `judge` returns None where
they would be needed.
"""

import re
from collections.abc import Sequence

from grail_lightning.answers.compare import (
    LAYERS,
    Conventions,
    Cuts,
    Formulas,
    Outcome,
    Undecided,
    Unparseable,
    as_cuts,
    capped,
    same_form,
)
from grail_lightning.answers.normalise import normalise, string_key, text_key
from grail_lightning.answers.parse import Node, letters, negated, number
from grail_lightning.answers.structure import Answer, Broken, Group, Leaf, Many, Quantity, Relation, Union, Words, read
from grail_lightning.answers.values import TooLarge, Undefined, ratio_sign
from grail_lightning.answers.wording import (
    distinct_names,
    e_spelled_out,
    has_other_letters,
    head,
    inverted,
    is_name,
    letters_of,
    lowest_terms,
    named_sides,
    named_value,
    same_wording,
    sentence,
    spelled_alike,
    without_letters,
)

__all__ = ["answer_classes", "judge", "text_classes"]


_MOST_ITEMS = 64
# Of each sign the one that it is written with, and whether the sides are turned for that.
_TURNS = {"<": ("<", 1), ">": ("<", -1), r"\le": (r"\le", 1), r"\ge": (r"\le", -1), r"\ne": (r"\ne", 0)}
# `(B)24`: the letter of a choice, and behind it what is chosen, in which there is no second answer.
_CHOICE = re.compile(r"\(([A-E])\)(?!.*\bor\b)(?:[0-9]|\\\$|\\frac|\\sqrt)[^A-Z(,;=]*")


def judge(gold: str, prediction: str, conventions: Conventions, *, slow: bool = False) -> Outcome | None:
    """Compare a bare answer with its reference.

    Args:
        gold: the reference.
        prediction: the model's answer, any string.
        conventions: what counts as equal, and the caps.
        slow: whether the slow layers may be asked.

    Returns:
        The outcome; None if a slow layer is needed and not allowed. An exception is a bug of a layer, for the caller to
        tell from a bad answer.
    """
    if not prediction.strip():
        return Outcome("missing", "none")
    if gold.strip() == prediction.strip():
        return Outcome("right", "string")
    if capped(prediction, conventions) or capped(gold, conventions):
        return Outcome("capped", "none")
    try:
        return _Comparison(conventions, slow=slow).outcome(normalise(gold), normalise(prediction))
    except Undecided:
        return None
    except (TooLarge, RecursionError):
        return Outcome("capped", "none")
    except Unparseable:
        return Outcome("unparseable", "none")
    except Undefined:
        return Outcome("wrong", "number")


class _Comparison(Formulas):
    """One pair on its way down the layers.

    Lists are compared in any order, inside a sentence (`ordered`) in theirs: "the least and the greatest are 1, 2".
    """

    ordered = False

    def outcome(self, gold: str, prediction: str) -> Outcome:
        if not prediction:
            return Outcome("unparseable", "none")
        if string_key(gold) == string_key(prediction):
            return Outcome("right", "string")
        if re.fullmatch(r"\(?[A-E]\)?", gold) and (chosen := _CHOICE.fullmatch(prediction)):
            prediction = chosen[1]
        prediction = e_spelled_out(prediction, gold)
        if _same_literals(gold, prediction):
            return Outcome("right", "number")
        if same_wording(gold, prediction, ignore_case=self.conventions.ignore_case) or self.sentences(gold, prediction):
            return Outcome("right", "structure")
        gold_answer, answer = read(gold), read(prediction)
        if isinstance(answer, Broken):
            return Outcome("unparseable", "none")
        if not isinstance(gold_answer, Leaf) or not isinstance(answer, Leaf):
            self.reach("structure")
        equal = self.answers(gold_answer, answer)
        return Outcome("right" if equal else "wrong", LAYERS[self.layer])

    # structure --------------------------------------------------------------------------------------------------------
    def sentences(self, gold: str, other: str) -> bool:
        """Whether two answers are sentences of the same words, with equal formulas between them."""
        one, two = (sentence(text, ignore_case=self.conventions.ignore_case) for text in (gold, other))
        if one is None or two is None or one[0] != two[0]:
            return False
        exactly = _Comparison(self.conventions, slow=False)  # the way a sentence says it is part of it
        exactly.ordered = True
        try:
            return all(map(exactly.same_place, one[1], two[1]))
        except (Unparseable, Undecided):
            return False

    def same_place(self, gold: str, other: str) -> bool:
        """Whether two formulas at one place of a sentence are equal."""
        return _same_literals(gold, other) or self.answers(read(gold), read(other))

    def answers(self, gold: Answer, other: Answer) -> bool:
        """Whether two answers of any kinds are equal."""
        match _unwrapped(gold), _unwrapped(other):
            case Leaf() as gold, Leaf() as other:
                return self.leaves(gold, other)
            case Words() as gold, Words() as other:
                return gold.text == other.text if self.conventions.ignore_case else gold.exact == other.exact
            case Group() as gold, Group() as other:
                if gold.brackets == other.brackets:
                    return self.in_order(gold.items, other.items)
                sides = _vector(gold), _vector(other)
                return sides[0] is not None and sides[1] is not None and self.in_order(sides[0], sides[1])
            case (Relation(), _) | (_, Relation()) as sides:
                return self.relations(*sides)
            case gold, other:
                return self.mixed(gold, other)

    def mixed(self, gold: Answer, other: Answer) -> bool:
        """Two kinds that may still say the same."""
        if isinstance(gold, Group) and isinstance(other, Many) and not other.braced:
            bare = self.conventions.bare_tuple and gold.brackets == "()" and other.joint == ","
            return bare and self.in_order(gold.items, other.items)
        if spelled_alike(gold, other, ignore_case=self.conventions.ignore_case) or (_empty(gold) and _empty(other)):
            return True
        if isinstance(gold, Many) and isinstance(other, Many) and _joined_alike(gold, other):
            return self.collections(gold, other) or self.same_set(gold, other)
        return self.same_set(gold, other)

    def in_order(self, gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
        return len(gold) == len(other) and all(map(self.answers, gold, other))

    def collections(self, gold: Many, other: Many) -> bool:
        """Each member of either has an equal in the other."""
        if max(len(gold.items), len(other.items)) > _MOST_ITEMS:
            raise TooLarge("a collection of very many members")
        braced = gold.braced or other.braced
        named = distinct_names(gold) and not any(isinstance(item, Relation) for item in other.items)
        if named or (self.ordered and not braced):
            return self.in_order(gold.items, other.items)
        if not braced:
            return self.one_to_one(gold.items, other.items)
        return all(any(self.answers(g, o) for o in other.items) for g in gold.items) and all(
            any(self.answers(g, o) for g in gold.items) for o in other.items
        )

    def one_to_one(self, gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
        """Lists in any order, each member as often in one as in the other."""
        if len(gold) != len(other):
            return False
        left = list(other)
        for item in gold:
            twin = next((place for place, candidate in enumerate(left) if self.answers(item, candidate)), None)
            if twin is None:
                return False
            del left[twin]
        return True

    def same_set(self, gold: Answer, other: Answer) -> bool:
        left, right = as_cuts(gold), as_cuts(other)
        if left is not None and right is not None:
            return self.cuts(left, right)
        if isinstance(gold, Union) and isinstance(other, Union) and set(gold.signs + other.signs) == {r"\cup"}:
            return self.collections(Many(gold.parts), Many(other.parts))
        return False

    def cuts(self, left: Cuts, right: Cuts) -> bool:
        """Whether two sets of real numbers begin and end at the same places."""
        return len(left) == len(right) and all(
            one.after == two.after and self.nodes(one.node, two.node) for one, two in zip(left, right, strict=True)
        )

    # relations --------------------------------------------------------------------------------------------------------
    def relations(self, gold: Answer, other: Answer) -> bool:
        if isinstance(gold, Relation) and isinstance(other, Relation):
            return self.two_relations(gold, other)
        if isinstance(other, Relation) and set(other.signs) == {r"\approx"} and not is_name(other.sources[0]):
            return self.answers(gold, other.sides[0])  # `3\sqrt{7} \approx 7.94`: the exact value is the answer
        if isinstance(other, Relation):
            return self.claimed(gold, other) or self.same_set(gold, other)
        assert isinstance(gold, Relation)
        if set(gold.signs) == {r"\approx"}:
            return any(self.answers(side, other) for side in gold.sides)
        value = named_value(gold)
        return (value is not None and self.answers(value, other)) or self.same_set(gold, other)

    def claimed(self, gold: Answer, relation: Relation, *, derived: bool = True) -> bool:
        r"""Whether `name = ... = value` says the reference; every further side must say it too, so `0=7` is not 7.

        With `derived`, a formula between a name and a number need not: of the letters in `V=\pi r^2h=12\pi` only the
        problem knows the values. Of a number, `m+n=17` says it as well; `x-y=0` is the equation of a line.
        """
        if set(relation.signs) - {"=", r"\in", r"\equiv", r"\approx"}:
            return False
        named = named_sides(relation, gold)
        if r"\in" in relation.signs:
            return len(relation.sides) == 2 and named[0] and self.answers(gold, relation.sides[1])
        values = [side for side, name in zip(relation.sides, named, strict=True) if not name]
        if derived and named[0] and without_letters(gold) and without_letters(values[-1]):
            values = [side for side in values if not has_other_letters(side, relation.sides[0])]
        return all(self.answers(gold, side) for side in values)

    def two_relations(self, gold: Relation, other: Relation) -> bool:
        if gold.signs == other.signs and (gold.signs == ("=",) or set(gold.signs) == {r"\in"}):
            return self.equations(gold, other)
        if set(gold.signs + other.signs) == {"="}:  # chains: the names at their heads, and the last sides
            derived = all(map(without_letters, gold.sides[1:]))  # a reference that derives its value tells how
            heads = head(gold.sources[0]) == head(other.sources[0]) and named_sides(gold)[0]
            return heads and self.claimed(gold.sides[-1], other, derived=derived)
        left, right = as_cuts(gold), as_cuts(other)
        if left is not None and right is not None:
            return letters_of(gold) == letters_of(other) and self.cuts(left, right)
        if gold.signs == other.signs and self.in_order(gold.sides, other.sides):
            return True
        (sign, turn), (twin, other_turn) = (_TURNS.get(" ".join(relation.signs), ("", 0)) for relation in (gold, other))
        if not sign or sign != twin:
            return False
        ratio = self.ratio(gold, other)
        return ratio != 0 and (sign == r"\ne" or ratio == turn * other_turn)

    def equations(self, gold: Relation, other: Relation) -> bool:
        nodes = [side.node for side in gold.sides + other.sides if isinstance(side, Leaf) and side.node is not None]
        if len(nodes) == 4 and not any(map(letters, nodes)):  # `2^3=8` is about its form: `8=8` says nothing
            return same_form(nodes[0], nodes[2]) and same_form(nodes[1], nodes[3])
        ours, theirs = ([head(source) for source in relation.sources] for relation in (gold, other))
        for left, right in ((0, 1), (1, 0)):
            if ours[0] == theirs[left] and self.answers(gold.sides[1], other.sides[right]):
                return True
            if ours[1] == theirs[right] and self.answers(gold.sides[0], other.sides[left]):
                return True
        if gold.signs[0] != "=":
            return False
        upside_down, value = inverted(gold.sources[0]), gold.sides[-1]
        if upside_down is not None and head(upside_down) == theirs[0] and isinstance(value, Leaf) and value.node:
            turned = Node("divide", "", (number(1), value.node))  # AB/CD = 3/2 says CD/AB = 2/3
            twin = other.sides[-1]
            return isinstance(twin, Leaf) and twin.node is not None and self.nodes(turned, twin.node)
        named = is_name(gold.sources[0]) and is_name(other.sources[0]) and ours[0] != theirs[0]
        if named and (without_letters(gold.sides[-1]) or without_letters(other.sides[-1])):
            return False  # x=5 is not y=5
        return self.ratio(gold, other) != 0

    def ratio(self, gold: Relation, other: Relation) -> int:
        """The sign of the constant by which two relations are multiples of each other, 0 if they are not."""
        differences = []
        for relation in (gold, other):
            left, right = relation.sides
            if not isinstance(left, Leaf) or not isinstance(right, Leaf) or left.node is None or right.node is None:
                return 0
            if left.quantity[1:] != Quantity("")[1:] or right.quantity[1:] != Quantity("")[1:]:
                return 0
            differences.append(Node("add", "", (left.node, negated(right.node))))
        self.reach("symbolic")
        return ratio_sign(*differences)


def _same_literals(one: str, two: str) -> bool:
    return string_key(lowest_terms(one)) == string_key(lowest_terms(two))


def _empty(answer: Answer) -> bool:
    """Whether an answer is the empty set, or says that there is nothing."""
    return answer == Many((), braced=True) or (isinstance(answer, Words) and answer.text == "none")


def _joined_alike(one: Many, two: Many) -> bool:
    """Whether two lists may be compared by members: `x<1 and x>3` is not `x<1 or x>3`, though `1 and 3` is `1 or 3`."""
    bounds = any(isinstance(item, Relation) and {"<", ">", r"\le", r"\ge"} & set(item.signs) for item in one.items)
    return not bounds or {one.joint, two.joint} != {"and", "or"}


def _unwrapped(answer: Answer) -> Answer:
    """The one member of a collection of one."""
    alone = isinstance(answer, Many) and len(answer.items) == 1 and not isinstance(answer.items[0], Many)
    return answer.items[0] if alone and isinstance(answer, Many) else answer


def _vector(group: Group) -> tuple[Answer, ...] | None:
    """The entries of a tuple, or of a matrix of one row or one column."""
    if group.brackets == "matrix":
        rows = [row.items for row in group.items if isinstance(row, Group)]
        return rows[0] if len(rows) == 1 else tuple(row[0] for row in rows) if len(rows[0]) == 1 else None
    return group.items if group.brackets == "()" else None


_MOST_COMPARED = 64


def answer_classes(answers: Sequence[str | None], conventions: Conventions | None = None) -> list[int]:
    r"""A number for each answer, equal for answers that say the same; -1 for none.

    Answers are equal if they are after normalisation, or if the verifier's cheap layers (strings, numbers, structure)
    say so of the first answer of a class: `0.5`, `\frac12` and `1/2` are one class. The reference has no part in it,
    so right and wrong answers are grouped alike. The slow layers are not asked: `(x+1)^2` and `x^2+2x+1` are two
    classes. The text is never evaluated, and answers beyond the caps are compared as text.

    Args:
        answers: The bare answers of the samples of one problem; None or blank text is no answer.
        conventions: What counts as equal where people differ, and the caps; None for the defaults.

    >>> answer_classes(["1/2", None, "0.5", "2"])
    [0, -1, 0, 1]
    """
    rules = conventions or Conventions()
    number_of: dict[str, int] = {}
    first: list[str] = []
    found = []
    for answer in answers:
        if answer is None or not answer.strip():
            found.append(-1)
            continue
        key = answer.strip() if capped(answer, rules) else string_key(normalise(answer))
        if key not in number_of:
            compared = enumerate(first[:_MOST_COMPARED])
            number_of[key] = next((n for n, other in compared if _equal(other, answer, rules)), len(first))
            if number_of[key] == len(first):
                first.append(answer)
        found.append(number_of[key])
    return found


def text_classes(answers: Sequence[str | None], *, ignore_case: bool) -> list[int]:
    """The class of each answer, where answers are plain text and compared as `Verdict.of_text` compares them.

    Args:
        answers: The answers of the samples of one problem; None or blank text is no answer.
        ignore_case: Whether upper and lower case are the same.

    >>> text_classes(["Paris", None, "paris", "Rome"], ignore_case=True)
    [0, -1, 0, 1]
    """
    keys = [text_key(answer or "", ignore_case=ignore_case) for answer in answers]
    number_of: dict[str, int] = {}
    return [number_of.setdefault(key, len(number_of)) if key else -1 for key in keys]


def _equal(one: str, other: str, conventions: Conventions) -> bool:
    try:
        outcome = judge(one, other, conventions)
    except Exception:  # A bug of a layer, which `Verifier` reports; a vote does not end an evaluation.
        return False
    return outcome is not None and outcome.status == "right"

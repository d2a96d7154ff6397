r"""Are two answers equal? Layers, cheapest first; each acceptance names the layer that made it.

`string`: the same after `normalise`. `number`: equal rational values. `structure`: tuples, sets, intervals, relations,
ratios, bases, matrices, words whose parts are equal. `symbolic`: formulas that agree at random points to a hundred
digits. `math-verify`: what the own grammar does not cover. The first three run in the caller's process: string and
Fraction work under caps. The last two are slow and run in a worker; unless they are allowed, `judge` returns None where
they would be needed.
"""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from grail_lightning.answers.compare import (
    LAYERS,
    Conventions,
    Formulas,
    Outcome,
    Undecided,
    Unparseable,
    as_cuts,
    capped,
    same_form,
)
from grail_lightning.answers.normalise import normalise, string_key
from grail_lightning.answers.parse import Node, letters, negated
from grail_lightning.answers.records import text_key
from grail_lightning.answers.structure import Answer, Broken, Group, Leaf, Many, Quantity, Relation, Words, read
from grail_lightning.answers.values import TooLarge, Undefined, ratio_sign
from grail_lightning.answers.wording import (
    has_other_letters,
    lowest_terms,
    named_sides,
    named_value,
    same_wording,
    spelled_alike,
    without_letters,
)

_MOST_ITEMS = 64
# Of each sign the one that it is written with, and whether the sides are turned for that.
_TURNS = {"<": ("<", 1), ">": ("<", -1), r"\le": (r"\le", 1), r"\ge": (r"\le", -1), r"\ne": (r"\ne", 0)}
# `(B)24`: the letter of a choice, and behind it what is chosen, in which there is no second answer.
_CHOICE = re.compile(r"\(([A-E])\)(?!.*\bor\b)(?:[0-9]|\\\$|\\frac|\\sqrt)[^A-Z(,;=]*")


def judge(gold: str, prediction: str, conventions: Conventions, *, slow: bool = False) -> Outcome | None:
    """Compare a bare answer, any string, with its reference; None if a slow layer is needed and not allowed.

    An exception is a bug of a layer, for the caller to tell from a bad answer.
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


def fault_of(error: BaseException) -> str:
    """An exception and where it was raised, short enough for a log."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "grail_lightning" in frame.filename] or frames
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {ascii(str(error))[1:-1][:120]}{place}"


class _Comparison(Formulas):
    """One pair on its way down the layers."""

    def outcome(self, gold: str, prediction: str) -> Outcome:
        if string_key(gold) == string_key(prediction):
            return Outcome("right" if prediction else "unparseable", "string")
        if re.fullmatch(r"\(?[A-E]\)?", gold) and (choice := _CHOICE.fullmatch(prediction)):
            prediction = choice[1]
        if string_key(lowest_terms(gold)) == string_key(lowest_terms(prediction)):
            return Outcome("right", "number")
        if same_wording(gold, prediction, ignore_case=self.conventions.ignore_case):
            return Outcome("right", "structure")
        gold_answer, answer = read(gold), read(prediction)
        if isinstance(answer, Broken):
            return Outcome("unparseable", "none")
        if not isinstance(gold_answer, Leaf) or not isinstance(answer, Leaf):
            self.reach("structure")
        equal = self.answers(gold_answer, answer)
        return Outcome("right" if equal else "wrong", LAYERS[self.layer])

    # structure --------------------------------------------------------------------------------------------------------
    def answers(self, gold: Answer, other: Answer) -> bool:
        """Whether two answers of any kinds are equal."""
        match gold, other:
            case Leaf() as gold, Leaf() as other:
                return self.leaves(gold, other)
            case Words() as gold, Words() as other:
                return gold.text == other.text if self.conventions.ignore_case else gold.exact == other.exact
            case Group() as gold, Group() as other:
                return gold.brackets == other.brackets and self.in_order(gold.items, other.items)
            case (Relation(), _) | (_, Relation()) as sides:
                return self.relations(*sides)
            case gold, other:
                return self.mixed(gold, other)

    def mixed(self, gold: Answer, other: Answer) -> bool:
        """Two kinds that may still say the same."""
        if isinstance(gold, Group) and isinstance(other, Many) and not other.braced:
            bare = self.conventions.bare_tuple and gold.brackets == "()" and other.joint == ","
            return bare and self.in_order(gold.items, other.items)
        if spelled_alike(gold, other, ignore_case=self.conventions.ignore_case):
            return True
        if isinstance(gold, Many) and isinstance(other, Many) and _joined_alike(gold, other):
            return self.one_to_one(gold, other) or self.same_set(gold, other)
        return self.same_set(gold, other)

    def in_order(self, gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
        return len(gold) == len(other) and all(map(self.answers, gold, other))

    def one_to_one(self, gold: Many, other: Many) -> bool:
        """Lists and sets in any order, each member as often in one as in the other."""
        if max(len(gold.items), len(other.items)) > _MOST_ITEMS:
            raise TooLarge("a collection of very many members")
        if _distinct_names(gold) and not any(isinstance(item, Relation) for item in other.items):
            return self.in_order(gold.items, other.items)  # `1, 2` for `x=1, y=2`
        if len(gold.items) != len(other.items):
            return False
        left = list(other.items)
        for item in gold.items:
            twin = next((place for place, candidate in enumerate(left) if self.answers(item, candidate)), None)
            if twin is None:
                return False
            del left[twin]
        return True

    def same_set(self, gold: Answer, other: Answer) -> bool:
        """Whether two sets of real numbers begin and end at the same places."""
        left, right = as_cuts(gold), as_cuts(other)
        if left is None or right is None or len(left) != len(right):
            return False
        cuts = zip(left, right, strict=True)
        return all(one.after == two.after and self.nodes(one.node, two.node) for one, two in cuts)

    # relations --------------------------------------------------------------------------------------------------------
    def relations(self, gold: Answer, other: Answer) -> bool:
        if isinstance(gold, Relation) and isinstance(other, Relation):
            return self.two_relations(gold, other)
        if isinstance(other, Relation):
            return self.claimed(gold, other) or self.same_set(gold, other)
        assert isinstance(gold, Relation)
        value = gold.sides[-1] if set(gold.signs) == {r"\approx"} else named_value(gold)
        return (value is not None and self.answers(value, other)) or self.same_set(gold, other)

    def claimed(self, gold: Answer, relation: Relation, *, derived: bool = True) -> bool:
        r"""Whether `name = ... = value` says the reference; every further side must say it too, so `0=7` is not 7.

        With `derived`, a formula between a name and a number need not: of the letters in `V=\pi r^2h=12\pi` only the
        problem knows the values. Of a number, `m+n=17` says it as well; `x-y=0` is the equation of a line.
        """
        if set(relation.signs) - {"=", r"\in", r"\equiv", r"\approx"}:
            return False
        named = named_sides(relation, gold)
        values = [side for side, name in zip(relation.sides, named, strict=True) if not name]
        if derived and named[0] and without_letters(gold) and without_letters(values[-1]):
            values = [side for side in values if not has_other_letters(side, relation.sides[0])]
        if relation.signs == (r"\approx",):  # `3\sqrt{7} \approx 7.94`: the exact value is the answer
            values = values[:1]
        return all(self.answers(gold, side) for side in values)

    def two_relations(self, gold: Relation, other: Relation) -> bool:
        if gold.signs == other.signs and (gold.signs == ("=",) or set(gold.signs) == {r"\in"}):
            return self.equations(gold, other)
        if set(gold.signs + other.signs) == {"="}:  # chains: the names at their heads, and the last sides
            derived = all(map(without_letters, gold.sides[1:]))  # a reference that derives its value tells how
            heads = string_key(gold.sources[0]) == string_key(other.sources[0]) and named_sides(gold)[0]
            return heads and self.claimed(gold.sides[-1], other, derived=derived)
        if as_cuts(gold) is not None and as_cuts(other) is not None:
            return _letters_of(gold) == _letters_of(other) and self.same_set(gold, other)
        (sign, turn), (twin, other_turn) = (_TURNS.get(" ".join(relation.signs), ("", 0)) for relation in (gold, other))
        if not sign or sign != twin:
            return False
        ratio = self.ratio(gold, other)
        return ratio != 0 and (sign == r"\ne" or ratio == turn * other_turn)

    def equations(self, gold: Relation, other: Relation) -> bool:
        nodes = [side.node for side in gold.sides + other.sides if isinstance(side, Leaf) and side.node is not None]
        if len(nodes) == 4 and not any(map(letters, nodes)):  # `2^3=8` is about its form: `8=8` says nothing
            return same_form(nodes[0], nodes[2]) and same_form(nodes[1], nodes[3])
        ours, theirs = ([string_key(source) for source in relation.sources] for relation in (gold, other))
        for left, right in ((0, 1), (1, 0)):
            if ours[0] == theirs[left] and self.answers(gold.sides[1], other.sides[right]):
                return True
            if ours[1] == theirs[right] and self.answers(gold.sides[0], other.sides[left]):
                return True
        return gold.signs[0] == "=" and self.ratio(gold, other) != 0

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


def _joined_alike(one: Many, two: Many) -> bool:
    """Whether two lists may be compared by members: `x<1 and x>3` is not `x<1 or x>3`, though `1 and 3` is `1 or 3`."""
    bounds = any(isinstance(item, Relation) and {"<", ">", r"\le", r"\ge"} & set(item.signs) for item in one.items)
    return not bounds or {one.joint, two.joint} != {"and", "or"}


def _distinct_names(answer: Many) -> bool:
    """Whether every member is a relation about a name of its own, so that a bare list must keep the order."""
    names = [
        string_key(item.sources[0]) for item in answer.items if isinstance(item, Relation) and named_sides(item)[0]
    ]
    return len(names) == len(set(names)) == len(answer.items) > 1


def _letters_of(relation: Relation) -> set[str]:
    nodes = [side.node for side in relation.sides if isinstance(side, Leaf) and side.node is not None]
    return set[str]().union(*map(letters, nodes))


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
    classes = []
    for answer in answers:
        if answer is None or not answer.strip():
            classes.append(-1)
            continue
        key = answer.strip() if capped(answer, rules) else string_key(normalise(answer))
        if key not in number_of:
            compared = enumerate(first[:_MOST_COMPARED])
            number_of[key] = next((n for n, other in compared if _equal(other, answer, rules)), len(first))
            if number_of[key] == len(first):
                first.append(answer)
        classes.append(number_of[key])
    return classes


def text_classes(answers: Sequence[str | None], *, ignore_case: bool) -> list[int]:
    """The class of each answer, where answers are plain text and compared as `Verdict.of_text` compares them.

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

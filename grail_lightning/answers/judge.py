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
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from grail_lightning.answers.choices import same_choice, without_label
from grail_lightning.answers.compare import LAYERS, Conventions, Formulas, Undecided, Unparseable, capped, same_form
from grail_lightning.answers.named import by_axis, labelled, named_values, unnamed_items
from grail_lightning.answers.normalise import CACHED_CHARACTERS, normalise, string_key
from grail_lightning.answers.parse import Node, letters, negated, number
from grail_lightning.answers.quantity import NOTHING, Said, agree, unwrapped
from grail_lightning.answers.records import text_key
from grail_lightning.answers.relations import (
    determinant,
    equal_by_cases,
    finite_set,
    is_number,
    named_sides,
    named_value,
    same_set,
)
from grail_lightning.answers.shapes import Answer, Atom, Broken, Chain, Group, Many, Words, digits_of
from grail_lightning.answers.statements import as_named, same_statement
from grail_lightning.answers.structure import read
from grail_lightning.answers.values import TooLarge, Undefined, ratio_sign, rational

_MOST_ITEMS = 64
_MOST_COMPARED = 64
# Of each sign the one that it is written with, and whether the sides are turned for that.
_TURNS = {"<": ("<", 1), ">": ("<", -1), r"\le": (r"\le", 1), r"\ge": (r"\le", -1), r"\ne": (r"\ne", 0)}
_FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{(0*[1-9][0-9]*)\}", re.ASCII)
# A whole number to the power of one half that is nobody's script or argument: behind `_`, `^`, `}`, a letter or a digit
# it could be one, unless that ends a complete factor.
_HALF_POWER = re.compile(
    r"(?:(\\frac\{[^{}]*\}\{[^{}]*\}|\\sqrt\{[^{}]*\})|(?<![A-Za-z}\]^_.,\\])|(?<=\^\{1/2\}))"
    r"(?:\{([0-9]+)\}|(?<![0-9])([0-9]+))\^(?:\{1/2\}|\{\\frac\{1\}\{2\}\}|\\frac\{1\}\{2\})",
    re.ASCII,
)
_WRAPPED_WORD = re.compile(r"\\text\{[^{}]*[A-Za-z]\.?[A-Za-z][^{}]*\}", re.ASCII)
_WORDING = re.compile(r"[A-Za-z0-9 ,.:;'!?/()-]+", re.ASCII)


class Judgement(NamedTuple):
    """What `judge` found: the status of the verdict, the layer that decided, and an exception that is a bug of ours."""

    status: str
    layer: str
    fault: str = ""


def judge(gold: str, prediction: str, conventions: Conventions, *, slow: bool = False) -> Judgement | None:
    """Compare a bare answer, any string, with its reference; None if a slow layer is needed and not allowed.

    An exception inside of a layer is a bug of this package, and no bad answer: the status is `crashed`.
    """
    if not prediction.strip():
        return Judgement("missing", "none")
    if gold.strip() == prediction.strip():
        return Judgement("right", "string")
    if capped(prediction) or capped(gold):
        return Judgement("capped", "none")
    try:
        return _Comparison(conventions, slow=slow).outcome(normalise(gold), normalise(prediction))
    except Undecided:
        return None
    except (TooLarge, RecursionError):
        return Judgement("capped", "none")
    except Unparseable:
        return Judgement("unparseable", "none")
    except Undefined:
        return Judgement("wrong", "number")
    except MemoryError:
        return Judgement("crashed", "none")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "grail_lightning" in frame.filename][-1]
        place = f"({Path(ours.filename).name}:{ours.lineno})"
        return Judgement("crashed", "none", f"{type(error).__name__}: {ascii(str(error))[1:-1][:120]} {place}")


def _lowest_terms(text: str) -> str:
    r"""The text with each `\frac` of two whole numbers in lowest terms, and `n^{1/2}` as `\sqrt{n}`.

    One spelling of a number replaces another in its place, so a text keeps its meaning whatever it is.
    """

    def reduced(match: re.Match[str]) -> str:
        value = Fraction(int(match[1]), int(match[2]))
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    if r"\frac" in text:
        text = _FRACTION.sub(reduced, text)
    return string_key(_HALF_POWER.sub(r"\1\\sqrt{\2\3}", text) if "^" in text else text)


def _same_wording(first: str, second: str) -> bool:
    r"""Whether two answers without formulas are the same but for upright type around words, as `\text{June 20}`."""
    if not (_WRAPPED_WORD.search(first) or _WRAPPED_WORD.search(second)):
        return False
    plain = [re.sub(r" ?([,.:;!?/()-]) ?", r"\1", unwrapped(text)).strip(' "').rstrip(".!") for text in (first, second)]
    if not re.search(r"[0-9] ?[A-Za-z]", "|".join(plain)):  # a unit may differ from another by its case
        plain = [text.lower() for text in plain]
    return plain[0] == plain[1] and _WORDING.fullmatch(plain[0]) is not None


class _Comparison(Formulas):
    """One pair on its way down the layers."""

    def outcome(self, gold: str, prediction: str) -> Judgement:
        if string_key(gold) == string_key(prediction):
            return Judgement("right" if prediction else "unparseable", "string")
        chosen = same_choice(gold, prediction)
        if chosen is not None:
            return Judgement("right" if chosen else "wrong", "string")
        prediction = without_label(gold, prediction)
        if _lowest_terms(gold) == _lowest_terms(prediction):
            return Judgement("right", "number")
        if _same_wording(gold, prediction):
            return Judgement("right", "structure")
        prediction = as_named(gold, prediction)
        same = same_statement(gold, prediction)
        if same is not None:
            return Judgement("right" if same else "wrong", "structure")
        gold_answer, answer = read(gold), read(prediction)
        if isinstance(answer, Broken):
            return Judgement("unparseable", "none")
        if not isinstance(gold_answer, Atom) or not isinstance(answer, Atom):
            self.reach("structure")
        equal = self.answers(gold_answer, answer)
        return Judgement("right" if equal else "wrong", LAYERS[self.layer])

    # structure --------------------------------------------------------------------------------------------------------
    def answers(self, gold: Answer, other: Answer, *, same_unit: bool = False) -> bool:
        if isinstance(gold, Atom) != isinstance(other, Atom):
            gold, other = _quotient(gold), _quotient(other)
        if (by_name := self.by_name(gold, other)) is not None:
            return by_name
        gold, other = finite_set(gold), finite_set(other)
        match gold, other:
            case Atom(), Atom() if same_unit and not agree(gold.said, other.said, missing=False):
                return False
            case Atom(), Atom():
                return self.leaves(gold, other)
            case Words(), Words():
                return gold == other
            case (Words(words), Atom(text, said)) | (Atom(text, said), Words(words)):  # `odd` is no product here
                return said == NOTHING and words in (text.lower(), digits_of(text))
            case (Words("none"), Many(())) | (Many(()), Words("none")):
                return True
            case Group("cases"), Group("cases") if len(gold.items) == len(other.items):
                return self.one_to_one(Many(gold.items), Many(other.items)) or equal_by_cases(gold, other)
            case (Group("cases"), _) | (_, Group("cases")):
                return equal_by_cases(gold, other)
            case (Group("determinant"), Atom()) | (Atom(), Group("determinant")):
                rows, value = (gold, other) if isinstance(gold, Group) else (other, gold)
                expanded = determinant(rows)
                return expanded is not None and self.answers(Atom("", node=expanded), value)
            case Group(), Group():
                if {gold.brackets, other.brackets} == {"()", "matrix"}:
                    gold, other = _as_vector(gold), _as_vector(other)
                return gold.brackets == other.brackets and self.in_order(gold.items, other.items)
            case Group(brackets="()"), Many(braced=False, joint=","):
                return self.in_order(gold.items, other.items)
            case (Atom(), Many(braced=False, joint="and")) | (Many(braced=False, joint="and"), Atom()):
                number_of, mixed = (gold, other) if isinstance(gold, Atom) else (other, gold)
                whole = _mixed(mixed)
                return whole is not None and self.answers(number_of, whole)
            case (Chain(is_relation=True), _) | (_, Chain(is_relation=True)):
                return self.relations(gold, other)
            case Many(), Many() if _joined_alike(gold, other) and self.one_to_one(gold, other):
                return True
        return same_set(gold, other, self.nodes)

    def by_name(self, gold: Answer, other: Answer) -> bool | None:
        """Values with names: by name where both sides have names, by order where one has none; None without names."""
        ours, theirs = named_values(gold), named_values(other)
        if ours is not None and theirs is not None:
            return ours.keys() == theirs.keys() and all(self.answers(ours[name], theirs[name]) for name in ours)
        if ours is not None and (items := unnamed_items(other)) is not None:
            return self.in_order(by_axis(ours), items)
        if theirs is not None and (items := unnamed_items(gold)) is not None:
            return self.in_order(items, by_axis(theirs))
        if isinstance(gold, Group | Atom | Chain) and isinstance(other, Group | Atom | Chain):
            point, twin = labelled(gold), labelled(other)
            if point is not None and twin is not None:
                return point[0] == twin[0] and self.answers(point[1], twin[1])
            if point is not None and isinstance(other, Group):
                return self.answers(point[1], other)
            if twin is not None and isinstance(gold, Group):
                return self.answers(gold, twin[1])
        return None

    def in_order(self, gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
        return len(gold) == len(other) and all(map(self.answers, gold, other))

    def one_to_one(self, gold: Many, other: Many) -> bool:
        """Lists and sets in any order, each member as often in one as in the other."""
        if max(len(gold.items), len(other.items)) > _MOST_ITEMS:
            raise TooLarge("a collection of very many members")
        if len(gold.items) != len(other.items):
            return False
        members = list(other.items)
        # Where a list counts different things, each number belongs to its thing, and a bare list keeps the order.
        things = [{item.said for item in many.items if isinstance(item, Atom)} for many in (gold, other)]
        counts = [len(words) > 1 and NOTHING not in words for words in things]
        if counts[0] != counts[1] and NOTHING in things[counts[0]] and len(things[counts[0]]) == 1:
            return self.in_order(gold.items, other.items)
        counted = all(counts)
        for item in gold.items:
            twin = next((k for k, member in enumerate(members) if self.answers(item, member, same_unit=counted)), None)
            if twin is None:
                return False
            del members[twin]
        return True

    # relations --------------------------------------------------------------------------------------------------------
    def relations(self, gold: Answer, other: Answer) -> bool:
        match gold, other:
            case Chain(is_relation=True), Chain(is_relation=True):
                return self.two_relations(gold, other)
            case Chain(is_relation=True), _:
                value = gold.items[-1] if set(gold.signs) == {r"\approx"} else named_value(gold)
                equal = value is not None and self.answers(value, other)
            case _, Chain():
                equal = self.claimed(gold, other)
        return equal or same_set(gold, other, self.nodes)

    def claimed(self, gold: Answer, relation: Chain, *, derived: bool = True) -> bool:
        r"""Whether `name = ... = value` says the reference; every further side must say it too, so `0=7` is not 7.

        With `derived`, a formula between a name and a number need not: of the letters in `V=\pi r^2h=12\pi` only the
        problem knows the values. Of a number, `m+n=17` says it as well; `x-y=0` is the equation of a line.
        """
        if set(relation.signs) - {"=", r"\in", r"\equiv", r"\approx"}:
            return False
        named = named_sides(relation, gold)
        values = [side for side, name in zip(relation.items, named, strict=True) if not name]
        if derived and named[0] and is_number(gold) and is_number(values[-1]):
            name = _letters_of(relation.items[0])
            values = [side for side in values if not _letters_of(side) or name & _letters_of(side)]
        if relation.signs == (r"\approx",):  # `3\sqrt{7} \approx 7.94`: the exact value is the answer
            values = values[:1]
        return all(self.answers(gold, side) for side in values)

    def two_relations(self, gold: Chain, other: Chain) -> bool:
        if gold.signs == other.signs and (gold.signs == ("=",) or set(gold.signs) == {r"\in"}):
            return self.equations(gold, other)
        if set(gold.signs + other.signs) == {"="}:  # chains: the names at their heads, and the last sides
            derived = all(map(is_number, gold.items[1:]))  # a reference that derives its value tells how
            heads = string_key(gold.sources[0]) == string_key(other.sources[0]) and named_sides(gold)[0]
            return heads and self.claimed(gold.items[-1], other, derived=derived)
        if _letters_of(*gold.items) == _letters_of(*other.items) and same_set(gold, other, self.nodes):
            return True
        (sign, turn), (twin, other_turn) = (_TURNS.get(" ".join(relation.signs), ("", 0)) for relation in (gold, other))
        if not sign or sign != twin:
            return False
        ratio = self.ratio(gold, other)
        return ratio != 0 and (sign == r"\ne" or ratio == turn * other_turn)

    def equations(self, gold: Chain, other: Chain) -> bool:
        sides = [side for side in gold.items + other.items if isinstance(side, Atom) and side.said == NOTHING]
        nodes = [side.node for side in sides if side.node is not None]
        if len(nodes) == 4 and not any(map(letters, nodes)):  # `2^3=8` is about its form: `8=8` says nothing
            return same_form(nodes[0], nodes[2]) and same_form(nodes[1], nodes[3])
        ours, theirs = ([string_key(source) for source in relation.sources] for relation in (gold, other))
        for ourside, theirside in ((0, 0), (0, 1), (1, 0), (1, 1)):
            if ours[ourside] == theirs[theirside] and self.answers(gold.items[1 - ourside], other.items[1 - theirside]):
                return True
        return gold.signs[0] == "=" and self.ratio(gold, other) != 0

    def ratio(self, gold: Chain, other: Chain) -> int:
        """The sign of the constant by which two relations are multiples of each other, 0 if they are not."""
        differences = []
        for relation in (gold, other):
            left, right = relation.items
            if not isinstance(left, Atom) or not isinstance(right, Atom) or left.node is None or right.node is None:
                return 0
            if left.said != NOTHING or right.said != NOTHING:  # a unit
                return 0
            differences.append(Node("add", "", (left.node, negated(right.node))))
        self.reach("symbolic")
        return ratio_sign(*differences)


def _quotient(answer: Answer) -> Answer:
    """`3/4` for `3:4`, and any other answer as it is."""
    match answer:
        case Group(":", (Atom(one, said, node=Node() as over), Atom(two, other, node=Node() as under))) if (
            said == other == NOTHING
        ):
            return Atom(f"{one}/{two}", node=Node("divide", "", (over, under)))
    return answer


def _as_vector(group: Group) -> Group:
    """`(1,2)` for a matrix of one row or one column."""
    rows = [row.items for row in group.items if isinstance(row, Group)]
    if group.brackets != "matrix" or (len(rows) > 1 and len(rows[0]) > 1):
        return group
    return Group("()", tuple(cell for row in rows for cell in row))


def _joined_alike(first: Many, second: Many) -> bool:
    """Whether two lists may be compared by members: `x<1 and x>3` is not `x<1 or x>3`, though `1 and 3` is `1 or 3`."""
    bounds = any(isinstance(item, Chain) and {"<", ">", r"\le", r"\ge"} & set(item.signs) for item in first.items)
    names = {string_key(item.sources[0]) for item in first.items if isinstance(item, Chain) and item.is_relation}
    if len(names) > 1 and "or" in (first.joint, second.joint):  # `x=2, y=3` is not `x=2 or y=3`
        return first.joint == second.joint
    return not bounds or {first.joint, second.joint} != {"and", "or"}


def _mixed(answer: Answer) -> Atom | None:
    """`7 and 1/2` as one number."""
    match answer:
        case Many(
            (Atom(said=Said(kind=""), node=Node("number", whole)), Atom(text, said, Node() as part)), joint="and"
        ):
            value = rational(part)
            if (
                isinstance(whole, Fraction)
                and whole.denominator == 1
                and value is not None
                and 0 < value < 1
                and "." not in text
            ):
                total = whole + value
                return Atom(f"{total.numerator}/{total.denominator}", said, number(total))
    return None


def _letters_of(*answers: Answer) -> set[str]:
    return set[str]().union(*(letters(side.node) for side in answers if isinstance(side, Atom) and side.node))


def answer_classes(answers: Sequence[str | None]) -> list[int]:
    r"""A number for each answer, equal for answers that say the same; -1 for none.

    Answers are equal if they are after normalisation, or if the verifier's cheap layers (strings, numbers, structure)
    say so of the first answer of a class: `0.5`, `\frac12` and `1/2` are one class. The reference has no part in it,
    so right and wrong answers are grouped alike. The slow layers are not asked: `(x+1)^2` and `x^2+2x+1` are two
    classes. The text is never evaluated, and long answers (128 characters) are compared as text.

    Args:
        answers: The bare answers of the samples of one problem; None or blank text is no answer.

    >>> answer_classes(["1/2", None, "0.5", "2"])
    [0, -1, 0, 1]
    """
    number_of: dict[str, int] = {}
    first: list[str] = []
    classes = []
    for answer in answers:
        if answer is None or not answer.strip():
            classes.append(-1)
            continue
        key = answer.strip() if capped(answer) else string_key(normalise(answer))
        if key not in number_of:
            # Long ones would be read again for each comparison.
            others = [text for text in first[:_MOST_COMPARED] if max(len(text), len(answer)) <= CACHED_CHARACTERS]
            judged = (judge(other, answer, Conventions()) for other in others)
            same = (n for n, outcome in enumerate(judged) if outcome is not None and outcome.status == "right")
            number_of[key] = next(same, len(first))
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

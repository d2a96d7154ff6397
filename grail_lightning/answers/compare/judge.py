r"""Are two answers equal? Layers, cheapest first; each acceptance names the layer that made it.

`string`: the same after `normalise`. `number`: equal rational values. `structure`: tuples, sets, intervals, relations,
ratios, bases, matrices, words whose parts are equal. `symbolic`: formulas that agree at random points to a hundred
digits. `math-verify`: what the own grammar does not cover. The first three run in the caller's process: string and
Fraction work under caps. The last two need an engine (`symbolic.Symbolic`) and run in a worker; without an engine
`judge` returns None where they would be needed.
"""

from collections.abc import Sequence
from fractions import Fraction

from grail_lightning.answers.compare.conventions import Conventions, Engine, Outcome
from grail_lightning.answers.compare.evaluate import TooLarge, Undefined
from grail_lightning.answers.compare.exact import is_terminating, rational
from grail_lightning.answers.compare.formulas import infinite, same_form, sign_of_infinity, single
from grail_lightning.answers.compare.names import (
    bare_number,
    distinct_names,
    has_other_letters,
    head,
    is_name,
    is_zero,
    letters_of,
    named_sides,
    named_value,
    without_letters,
)
from grail_lightning.answers.compare.quantities import (
    clash,
    cut_off,
    factors_between,
    scaled_by_zeros,
    slack_between,
    times,
)
from grail_lightning.answers.compare.sets import Interval, as_intervals
from grail_lightning.answers.compare.shapes import joined_alike, unwrapped, vector
from grail_lightning.answers.compare.words import anagrams, same_wording, spelled_alike, wordy
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
from grail_lightning.answers.grammar.nodes import Node, letters
from grail_lightning.answers.grammar.normalise import capped, normalise, string_key
from grail_lightning.answers.grammar.prose import (
    e_notation_spelled_out,
    is_e_notation,
    lowest_terms,
    sentence,
)
from grail_lightning.answers.grammar.structure import read
from grail_lightning.answers.grammar.units import Quantity

__all__ = ["Conventions", "Outcome", "judge"]

LAYERS = ("string", "number", "structure", "symbolic", "math-verify")
_MOST_ITEMS = 64


class _Undecided(Exception):  # noqa: N818
    """Only an engine can tell."""


class _Unparseable(Exception):  # noqa: N818
    """The prediction has no meaning that any layer finds."""


def judge(gold: str, prediction: str, conventions: Conventions, engine: Engine | None = None) -> Outcome | None:
    """Compare a bare answer with its reference.

    Args:
        gold: the reference.
        prediction: the model's answer, any string.
        conventions: what counts as equal, and the caps.
        engine: the slow layers, or None to do without.

    Returns:
        The outcome; None if there is no engine and one is needed. An exception is a bug of a layer, for the caller to
        tell from a bad answer.
    """
    if not prediction.strip():
        return Outcome("missing", "none")
    if gold.strip() == prediction.strip():
        return Outcome("right", "string")
    limits = (conventions.max_characters, conventions.max_nesting, conventions.max_digits)
    if capped(prediction, *limits) or capped(gold, *limits):
        return Outcome("capped", "none")
    comparison = _Comparison(conventions, engine)
    try:
        return comparison.outcome(normalise(gold), normalise(prediction))
    except _Undecided:
        return None
    except TooLarge:
        return Outcome("capped", "none")
    except _Unparseable:
        return Outcome("unparseable", "none")
    except Undefined:
        return Outcome("wrong", "number")
    except RecursionError:
        return Outcome("capped", "none")


class _Comparison:
    """One pair on its way down the layers; `layer` is the deepest that was needed so far.

    Lists are compared in any order, inside a sentence (`ordered`) in theirs: "the least and the greatest are 1, 2".
    """

    def __init__(self, conventions: Conventions, engine: Engine | None, *, ordered: bool = False) -> None:
        self.conventions = conventions
        self.engine = engine
        self.ordered = ordered
        self.layer = 0

    def outcome(self, gold: str, prediction: str) -> Outcome:
        if not prediction:
            return Outcome("unparseable", "none")
        if string_key(gold) == string_key(prediction):
            return Outcome("right", "string")
        if is_e_notation(gold):
            prediction = e_notation_spelled_out(prediction)
        if string_key(lowest_terms(gold)) == string_key(lowest_terms(prediction)):
            return Outcome("right", "number")
        if same_wording(gold, prediction, ignore_case=self.conventions.ignore_case):
            return Outcome("right", "structure")
        if self.sentences(gold, prediction):
            return Outcome("right", LAYERS[self.layer])
        gold_answer, answer = read(gold), read(prediction)
        if isinstance(answer, Broken):
            return Outcome("unparseable", "none")
        if not isinstance(gold_answer, Leaf) or not isinstance(answer, Leaf):
            self.reach("structure")
        equal = self.answers(gold_answer, answer)
        return Outcome("right" if equal else "wrong", LAYERS[self.layer])

    def reach(self, layer: str) -> None:
        self.layer = max(self.layer, LAYERS.index(layer))

    # structure --------------------------------------------------------------------------------------------------------
    def sentences(self, gold: str, other: str) -> bool:
        """Whether two answers are sentences of the same words, with equal formulas between them."""
        ignore_case = self.conventions.ignore_case
        one, two = sentence(gold, ignore_case=ignore_case), sentence(other, ignore_case=ignore_case)
        if one is None or two is None or one[0] != two[0]:
            return False
        exactly = _Comparison(self.conventions, None, ordered=True)  # the way a sentence says it is part of it
        exactly.reach("structure")
        try:
            equal = all(exactly.same_place(*pair) for pair in zip(one[1], two[1], strict=True))
        except (_Unparseable, _Undecided):
            return False
        if equal:
            self.reach("structure")
        return equal

    def same_place(self, gold: str, other: str) -> bool:
        """Whether two formulas at one place of a sentence are equal."""
        if string_key(lowest_terms(gold)) == string_key(lowest_terms(other)):
            return True
        left, right = read(gold), read(other)
        return not isinstance(left, Broken) and not isinstance(right, Broken) and self.answers(left, right)

    def answers(self, gold: Answer, other: Answer) -> bool:
        """Whether two answers of any kinds are equal."""
        gold, other = unwrapped(gold), unwrapped(other)
        if isinstance(gold, Leaf) and isinstance(other, Leaf):
            return self.leaves(gold, other)
        if isinstance(gold, Words) and isinstance(other, Words):
            return gold.text == other.text if self.conventions.ignore_case else gold.exact == other.exact
        if isinstance(gold, Base) and isinstance(other, Base):
            return gold == other
        if isinstance(gold, Group) and isinstance(other, Group):
            return gold.brackets == other.brackets and self.in_order(gold.items, other.items)
        if isinstance(gold, Ratio) and isinstance(other, Ratio):
            return self.in_order(gold.items, other.items)
        if isinstance(gold, Matrix) and isinstance(other, Matrix):
            return self.matrices(gold, other)
        if isinstance(gold, Relation) or isinstance(other, Relation):
            return self.relations(gold, other)
        return self.mixed(gold, other)

    def mixed(self, gold: Answer, other: Answer) -> bool:
        """Two kinds that may still say the same."""
        if isinstance(gold, Group) and isinstance(other, Many) and not other.braced:
            bare = self.conventions.bare_tuple and gold.brackets == "()" and other.joint == ","
            return bare and self.in_order(gold.items, other.items)
        if isinstance(gold, Words) or isinstance(other, Words):
            if spelled_alike(gold, other, ignore_case=self.conventions.ignore_case):
                return True
            empty = Words("none", "none")
            kinds = [Words("none", answer.exact) if isinstance(answer, Words) else answer for answer in (gold, other)]
            if Many((), braced=True) in kinds and any(
                isinstance(answer, Words) and answer.text == empty.text for answer in (gold, other)
            ):
                return True
        if isinstance(gold, Matrix) or isinstance(other, Matrix):
            return self.vectors(gold, other)
        if isinstance(gold, Many) and isinstance(other, Many):
            return (joined_alike(gold, other) and self.collections(gold, other)) or self.same_set(gold, other)
        return self.same_set(gold, other)

    def in_order(self, gold: Sequence[Answer], other: Sequence[Answer]) -> bool:
        if len(gold) != len(other):
            return False
        return all(self.answers(*pair) for pair in zip(gold, other, strict=True))

    def collections(self, gold: Many, other: Many) -> bool:
        """Each member of either has an equal in the other."""
        if max(len(gold.items), len(other.items)) > _MOST_ITEMS:
            raise TooLarge("a collection of very many members")
        if not gold.items or not other.items:
            return not gold.items and not other.items
        in_order = self.ordered and not gold.braced and not other.braced
        if in_order or (distinct_names(gold) and not any(isinstance(item, Relation) for item in other.items)):
            return self.in_order(gold.items, other.items)
        if not gold.braced and not other.braced:
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

    def matrices(self, gold: Matrix, other: Matrix) -> bool:
        if gold.kind != other.kind:
            return False
        if len(gold.rows) != len(other.rows):
            return False
        return all(self.in_order(*rows) for rows in zip(gold.rows, other.rows, strict=True))

    def vectors(self, gold: Answer, other: Answer) -> bool:
        """A matrix of one column or one row and a tuple."""
        sides = [vector(gold), vector(other)]
        if sides[0] is None or sides[1] is None:
            return False
        return self.in_order(sides[0], sides[1])

    def same_set(self, gold: Answer, other: Answer) -> bool:
        if not any(isinstance(answer, Union | Relation | Many | Words) for answer in (gold, other)):
            return self.real_line(gold, other)
        left, right = as_intervals(gold), as_intervals(other)
        if left is not None and right is not None:
            return self.intervals(left, right)
        if isinstance(gold, Union) and isinstance(other, Union) and set(gold.signs + other.signs) == {r"\cup"}:
            return self.collections(Many(gold.parts), Many(other.parts))
        return False

    def real_line(self, gold: Answer, other: Answer) -> bool:
        r"""`\mathbb{R}` is a formula to the parser, and an interval to us."""
        left, right = as_intervals(gold), as_intervals(other)
        return left is not None and right is not None and self.intervals(left, right)

    def intervals(self, left: tuple[Interval, ...], right: tuple[Interval, ...]) -> bool:
        if len(left) != len(right):
            return False
        for one, two in zip(left, right, strict=True):
            for edge, twin in ((one.low, two.low), (one.high, two.high)):
                if edge.closed != twin.closed or not self.nodes(edge.node, twin.node, 0.0):
                    return False
        return True

    # relations --------------------------------------------------------------------------------------------------------
    def relations(self, gold: Answer, other: Answer) -> bool:
        if isinstance(gold, Relation) and isinstance(other, Relation):
            return self.two_relations(gold, other)
        if isinstance(other, Relation) and set(other.signs) == {r"\approx"} and not is_name(other.sources[0]):
            return self.answers(gold, other.sides[0])  # `3\sqrt{7} \approx 7.94`: the exact value is the answer
        if isinstance(gold, Relation) and set(gold.signs) == {r"\approx"}:
            return any(self.answers(side, other) for side in gold.sides)
        if isinstance(other, Relation):
            return self.claimed(gold, other) or self.same_set(gold, other)
        assert isinstance(gold, Relation)
        value = named_value(gold)
        return (value is not None and self.answers(value, other)) or self.same_set(gold, other)

    def claimed(self, gold: Answer, relation: Relation, *, derived: bool = True) -> bool:
        r"""Whether `name = ... = value` says the reference; every further side must say it too, so `0=7` is not 7.

        With `derived`, a formula between a name and a number need not: of the letters in `V=\pi r^2h=12\pi` only the
        problem knows the values. Of a number, `m+n=17` says it as well; `x-y=0` is the equation of a line.
        """
        if set(relation.signs) - {"=", r"\in", r"\equiv", r"\approx"}:
            return False
        number = without_letters(gold) and not is_zero(gold)
        named = named_sides(relation, combined=number and set(relation.signs) == {"="})
        if r"\in" in relation.signs:
            return len(relation.sides) == 2 and named[0] and self.answers(gold, relation.sides[1])
        values = [side for side, name in zip(relation.sides, named, strict=True) if not name]
        if derived and named[0] and without_letters(gold) and without_letters(values[-1]):
            values = [side for side in values if not has_other_letters(side, relation.sides[0])]
        return all(self.answers(gold, side) for side in values)

    def two_relations(self, gold: Relation, other: Relation) -> bool:
        if gold.signs == other.signs == ("=",) or (gold.signs == other.signs and set(gold.signs) == {r"\in"}):
            return self.equations(gold, other)
        if set(gold.signs + other.signs) == {"="}:
            return self.chains(gold, other)
        left, right = as_intervals(gold), as_intervals(other)
        if left is not None and right is not None:
            return letters_of(gold) == letters_of(other) and self.intervals(left, right)
        if gold.signs == other.signs and self.in_order(gold.sides, other.sides):
            return True
        return self.inequalities(gold, other)

    def chains(self, gold: Relation, other: Relation) -> bool:
        """Two chains of equations with names at their heads: the names and the last sides."""
        heads = head(gold.sources[0]) == head(other.sources[0]) and named_sides(gold)[0]
        derived = all(map(without_letters, gold.sides[1:]))  # a reference that derives its value tells how
        return heads and self.claimed(gold.sides[-1], other, derived=derived)

    def equations(self, gold: Relation, other: Relation) -> bool:
        names = [head(source) for source in gold.sources], [head(source) for source in other.sources]
        nodes = [side.node for side in gold.sides + other.sides if isinstance(side, Leaf) and side.node is not None]
        if len(nodes) == 4 and not any(map(letters, nodes)):  # `2^3=8` is about its form: `8=8` says nothing
            return same_form(nodes[0], nodes[2]) and same_form(nodes[1], nodes[3])
        for left, right in ((0, 1), (1, 0)):
            if names[0][0] == names[1][left] and self.answers(gold.sides[1], other.sides[right]):
                return True
            if names[0][1] == names[1][right] and self.answers(gold.sides[0], other.sides[left]):
                return True
        if gold.signs[0] != "=":
            return False
        heads = [relation.sources[0] for relation in (gold, other)]
        named = all(map(is_name, heads)) and head(heads[0]) != head(heads[1])
        if named and (bare_number(gold) or bare_number(other)):
            return False  # x=5 is not y=5
        return self.proportional(gold, other) != 0

    def inequalities(self, gold: Relation, other: Relation) -> bool:
        if len(gold.signs) != 1 or len(other.signs) != 1:
            return False
        turns = {"<": ("<", 1), ">": ("<", -1), r"\le": (r"\le", 1), r"\ge": (r"\le", -1), r"\ne": (r"\ne", 0)}
        (sign, turn), (twin, other_turn) = (turns.get(relation.signs[0], ("", 0)) for relation in (gold, other))
        if not sign or sign != twin:
            return False
        ratio = self.proportional(gold, other)
        return ratio != 0 and (sign == r"\ne" or ratio == turn * other_turn)

    def proportional(self, gold: Relation, other: Relation) -> int:
        differences = []
        for relation in (gold, other):
            left, right = relation.sides
            if not isinstance(left, Leaf) or not isinstance(right, Leaf) or left.node is None or right.node is None:
                return 0
            if left.quantity[1:] != Quantity("")[1:] or right.quantity[1:] != Quantity("")[1:]:
                return 0
            differences.append(Node("add", "", (left.node, Node("negate", "", (right.node,)))))
        self.reach("symbolic")
        return self.needed().ratio_sign(differences[0], differences[1])

    # formulas ---------------------------------------------------------------------------------------------------------
    def needed(self) -> Engine:
        if self.engine is None:
            raise _Undecided
        return self.engine

    def leaves(self, gold: Leaf, other: Leaf) -> bool:
        """Two formulas with what surrounds them."""
        left, right = gold.quantity, other.quantity
        if clash(left.unit, right.unit) or (not self.conventions.missing_unit and left.unit != right.unit):
            return False
        if string_key(left.text) == string_key(right.text) and left[2:] == right[2:]:
            return True
        if anagrams(left.text, right.text):
            return False
        if gold.node is None or other.node is None:
            return self.unknown(left, right, other.node is None)
        slack = slack_between(left, right, self.conventions.tolerance)
        if cut_off(right.text) and not cut_off(left.text):
            value = rational(gold.node)
            if not slack or (value is not None and is_terminating(value)):
                return False
        scaled_gold, scaled = scaled_by_zeros(gold.node, left.zeros), scaled_by_zeros(other.node, right.zeros)
        factors = factors_between(left, right, self.conventions)
        return any(self.nodes(times(scaled_gold, a), times(scaled, b), slack) for a, b in factors)

    def nodes(self, gold: Node, other: Node, slack: float) -> bool:
        left, right = rational(gold), rational(other)
        if gold == other:  # two spellings of one formula
            self.reach("structure" if left is None else "number")
            return True
        if left is not None and right is not None:
            self.reach("number")
            exact = left == right or slack == 0 or (is_terminating(left) and is_terminating(right))
            return left == right if exact else abs(left - right) <= Fraction(str(slack)) * abs(left)
        if infinite(gold) or infinite(other):
            return sign_of_infinity(gold) == sign_of_infinity(other) != 0
        if gold.kind == other.kind == "symbol":
            return False
        if (left is not None and single(other)) or (right is not None and single(gold)):
            return False
        engine = self.needed()
        self.reach("symbolic")
        return engine.equal(gold, other, slack)

    def unknown(self, left: Quantity, right: Quantity, prediction_unknown: bool) -> bool:
        """A formula outside of the grammar."""
        if wordy(left.text) or wordy(right.text):
            if prediction_unknown:
                raise _Unparseable
            return False
        engine = self.needed()
        self.reach("math-verify")
        verdict = engine.external(left.text, right.text, self.conventions.tolerance)
        if verdict is None:
            raise _Unparseable
        return verdict

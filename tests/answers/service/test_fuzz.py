"""Random text, in the shape of answers and in none: `grade` returns a verdict for each, and nothing else happens."""

import gc
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grail_lightning.answers import Verifier, find_boxes

STATUSES = {"right", "wrong", "missing", "capped", "unparseable", "timeout", "crashed"}
SPELLED = r"""
    \frac \dfrac12 \sqrt \sqrt[3] \left( \right] \{ \} \cup \in \le \ne \pm \infty \pi \cdot \times \circ % \% \$ $ \!
    \mid \\ & \text{min} \text{yes} \mathrm{~m} \overline{3} \begin{pmatrix} \begin{array}{r} \end{array} \boxed{ and or
    ( ) [ ] { } , ; : = < > + - * / ^ _ | ! . ' e i x y 0 1 2 9 10 007 1.5 .25 1e5 1E9999 8_{3}
"""
UNUSUAL = ["\0", "\ud800", "\u00bd", "\u0663", "\u2212", "\U0001d7d9", " ", "\n", "~", "\u202e", "\uff11"]
ATOMS = SPELLED.split() + UNUSUAL
grammar = st.lists(st.sampled_from(ATOMS), max_size=14).map("".join)
anything = st.text(st.characters(), max_size=40)
answers = st.one_of(grammar, grammar, anything)


def has_verdicts(verifier, pairs):
    verdicts = verifier.grade(pairs)
    assert [(verdict.gold, verdict.prediction) for verdict in verdicts] == pairs
    assert {verdict.status for verdict in verdicts} <= STATUSES
    assert all(verdict.correct == (verdict.status == "right") for verdict in verdicts)
    assert not verifier.faults
    return verdicts


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, timeout_seconds=2.0, cache_size=100) as opened:
        yield opened


def fuzz(verifier, examples, pairs_each):
    pair = st.tuples(answers, answers)
    graded = []

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(st.lists(pair, min_size=pairs_each, max_size=pairs_each))
    def check(pairs):
        for (gold, _), verdict in zip(pairs, has_verdicts(verifier, pairs), strict=True):
            assert gold.strip() or not verdict.correct  # nothing is equal to an empty reference
        graded.append(len(pairs))

    check()
    return sum(graded)


def test_no_exception_leaves_grade(verifier):
    assert fuzz(verifier, 60, 10) >= 600


@pytest.mark.slow
def test_no_exception_leaves_grade_in_twenty_thousand_pairs(verifier):
    assert fuzz(verifier, 1000, 20) >= 20_000


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(answers)
def test_an_answer_is_equal_to_itself_unless_it_is_empty(verifier, text):
    (verdict,) = verifier.grade([(text, text)])
    assert verdict.status == ("right" if text.strip() else "missing")


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(answers)
def test_boxes_lie_in_the_text_and_one_after_the_other(text):
    end = 0
    for box in find_boxes(text):
        assert end <= box.start < box.content_start <= box.content_stop < box.stop <= len(text)
        end = box.stop


def hostile_pairs(draw, count):
    """Each of its own, most as long and as branched as the caps allow."""
    long = [lambda: "+".join(draw.choices("123456789xy", k=900)), lambda: ",".join(draw.choices("123456789", k=900))]
    long += [lambda: "(" * 29 + "x" * 900 + ")" * 29, lambda: "9" * 900, lambda: "\\frac{1}{2}" * 150]
    made = ["".join(draw.choices(ATOMS, k=8)) + "+" + draw.choice(long)() for _ in range(count)]
    return [(str(draw.randrange(10**6)), text) for text in made]


@pytest.mark.slow
def test_the_memory_of_the_parent_stays_flat_over_five_thousand_hostile_pairs(verifier):
    draw = random.Random(2)
    verifier.grade(hostile_pairs(draw, 500))
    tracemalloc.start()
    try:
        for _ in range(10):
            verifier.grade(hostile_pairs(draw, 500))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # Verdicts of long answers are not kept, nor are their trees: one of these takes up to 0.1 MiB.
    assert grown < 8 * 2**20

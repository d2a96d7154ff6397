"""Chains of additions and subtractions: their splits, labels and demonstrations."""

import itertools
import random
import re

import pytest

from grail_lightning.tasks import ArithmeticTask, Problem, ProblemSpace, demonstration, misconception, split_of

TASK = ArithmeticTask()
P = "7+5-3+8"  # The problem of most cases: 7+5 = 12, 12-3 = 9, 9+8 = 17.


def prompt_of(expression):
    return TASK.prompt({"problem": expression})


def labels(expression, text):
    """Each step as (its text, its kind, the text of its result)."""
    steps = TASK.label_steps(text, prompt_of(expression))
    return [(text[s.start : s.stop], s.kind, None if s.result is None else text[slice(*s.result)]) for s in steps]


def kinds(expression, text):
    return [kind for _, kind, _ in labels(expression, text)]


# ---- problems


def test_a_row_becomes_a_prompt_with_its_reference():
    prompt = TASK.prompt({"problem": P, "level": 3})
    assert (prompt.messages, prompt.reference, prompt.task) == ("Compute 7+5-3+8.", "17", TASK)
    assert prompt.columns == {"problem": P, "level": 3}
    problem = Problem.parse("3-12+100")
    assert problem.totals == (3, -9, 91)  # 3-12 = -9, -9+100 = 91
    assert (problem.answer, problem.expression) == (91, "3-12+100")


@pytest.mark.parametrize("wrong", ["", "7", "7*5", "7+", "+7+5", "7+-5", "7 + 5", "٣+٤", "1" * 5000 + "+1"])
def test_what_is_no_expression_is_refused(wrong):
    with pytest.raises(ValueError, match=r"joined by \+ and -, such as '7\+5-3\+8', but got"):
        TASK.prompt({"problem": wrong})


def test_draws_are_distinct_of_the_asked_kind_and_repeatable():
    space = ProblemSpace(min_terms=3, max_terms=4, min_operand=2, max_operand=11, operators="-")
    drawn = space.draw(500, "train", seed=3)
    assert drawn == space.draw(500, "train", seed=3) != space.sample(500, "train", seed=4)
    assert len({p.expression for p in drawn}) == 500
    assert {len(p.operands) for p in drawn} == {3, 4}
    assert {b for p in drawn for b in p.operands} == set(range(2, 12))
    assert {sign for p in drawn for sign in p.operators} == {"-"}


def test_the_splits_share_no_problem_and_cover_the_space():
    space = ProblemSpace(min_terms=2, max_terms=3, max_operand=6)
    everything = {
        "".join(itertools.chain.from_iterable(zip(map(str, operands), [*signs, ""], strict=True)))
        for n in (2, 3)
        for operands in itertools.product(range(1, 7), repeat=n)
        for signs in itertools.product("+-", repeat=n - 1)
    }
    assert len(everything) == 936  # 6² · 2 + 6³ · 2² = 72 + 864
    sizes = {split: sum(split_of(e) == split for e in everything) for split in ("train", "validation", "test")}
    parts = [{p.expression for p in space.draw(size, split, seed=5)} for split, size in sizes.items()]
    assert sum(map(len, parts)) == 936
    assert set().union(*parts) == everything


def test_the_split_of_a_problem_is_the_same_on_every_machine():
    # Fixed values: a salted hash would differ from run to run.
    fixed = {"7+5-3+8": "train", "8-1": "train", "9-9": "validation", "3+3": "validation", "3-8": "test"}
    assert {expression: split_of(expression) for expression in fixed} == fixed
    for split in ("train", "validation", "test"):
        assert {split_of(p.expression) for p in ProblemSpace().draw(300, split)} == {split}


@pytest.mark.parametrize(
    ("options", "number", "split", "message"),
    [
        ({"min_terms": 1}, 1, "test", "2 <= min_terms <= max_terms, .*but got ProblemSpace.min_terms=1"),
        ({"max_terms": 4}, 1, "test", "2 <= min_terms <= max_terms"),
        ({"min_operand": -1}, 1, "test", "0 <= min_operand <= max_operand < 10\\^9, .*min_operand=-1"),
        ({"operators": "*"}, 1, "test", r"operators '\+', '-' or '\+-', but got .*operators='\*'"),
        ({}, 1, "dev", "`split` must be one of train, validation, test, but got 'dev'"),
        (
            {"min_terms": 2, "max_terms": 2, "max_operand": 3},
            17,
            "test",
            "The test split hardly has 17 different problems: only",
        ),
        ({}, 10**12, "train", r"All splits hold 944784 problems, but got 10{12}"),
    ],
)
def test_problems_that_cannot_be_drawn_are_refused_at_once(options, number, split, message):
    with pytest.raises(ValueError, match=message):
        ProblemSpace(**options).draw(number, split)


# ---- labels

CHAINS = {
    "a right chain is sound, and its box no step": (
        "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}",
        [("7+5=12", "sound", "12"), ("12-3=9", "sound", "9"), ("9+8=17", "sound", "17")],
    ),
    "a random wrong result is a slip, what follows from it is inherited": (
        "7+5=13\n13-3=10\n10+8=18\n\\boxed{18}",
        [("7+5=13", "slip", "13"), ("13-3=10", "inherited", "10"), ("10+8=18", "inherited", "18")],
    ),
    "a forgotten carry is a misconception": (  # 9+8: the units 9+8 = 17 carry; without the carry 17-10 = 7.
        "7+5=12\n12-3=9\n9+8=7\n\\boxed{7}",
        [("7+5=12", "sound", "12"), ("12-3=9", "sound", "9"), ("9+8=7", "misconception", "7")],
    ),
    "a miscopied total is a slip at the total": (
        "7+5=12\n11-3=8\n8+8=16\n\\boxed{16}",
        [("7+5=12", "sound", "12"), ("11-3=8", "slip", "11"), ("8+8=16", "inherited", "16")],
    ),
    "a miscopied term is a slip at the term": ("7+5=12\n12-4=8", [("7+5=12", "sound", "12"), ("12-4=8", "slip", "-4")]),
    "a miscopied sign too": ("7+5=12\n12+3=15", [("7+5=12", "sound", "12"), ("12+3=15", "slip", "+3")]),
    # The due total behind +8 is 17, so 12+8 = 20 is wrong; the box copies it.
    "a skipped term is one slip": (
        "7+5=12\n12+8=20\n\\boxed{20}",
        [("7+5=12", "sound", "12"), ("12+8=20", "slip", "+8")],
    ),
    "words are filler, and empty lines are nothing": (
        "Then\n\n7+5=12\nso \\boxed{17}.",
        [("Then", "filler", None), ("7+5=12", "sound", "12"), ("so ", "filler", None), (".", "filler", None)],
    ),
    "an equation may stand among words and blanks": (
        "First, 7 + 5 = 13.",
        [("First, 7 + 5 = 13.", "slip", "13")],
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_each_step_is_labelled_where_its_error_shows(case):
    text, expected = CHAINS[case]
    assert labels(P, text) == expected


KINDS = [
    # 12+5 = 17 without a carry, and 17-5 = 12 is no addition: a result ten too small is a slip.
    ("12+5-5", "12+5=7\n7-5=2", ["slip", "inherited"]),
    ("12+5-5", "12+5=17\n17-5=2", ["sound", "slip"]),
    # An error on an inherited total: 13-3 = 10; and 15+8 carries (5+8 = 13): 23 without the carry is 13.
    (P, "7+5=13\n13-3=11\n11+8=19", ["slip", "slip", "inherited"]),
    (P, "7+5=18\n18-3=15\n15+8=13", ["slip", "inherited", "misconception"]),
    # Negative totals: 2-9 = -7, -7+8 = 1.
    ("2-9+8", "2-9=-7\n-7+8=1\n\\boxed{1}", ["sound", "sound"]),
    # A repeated term: 9-3 = 6 takes the 3 away twice; 6+8 = 14 is due after it.
    (P, "7+5=12\n12-3=9\n9-3=6\n6+8=14\n\\boxed{14}", ["sound", "sound", "slip", "inherited"]),
    (P, "7+5=12\n12-3=9\n9+8=17\n17+1=18\n\\boxed{18}", ["sound"] * 3 + ["slip"]),
    # Going back to the right total, and errors that cancel: 13-3 = 10, but 9 is what was due.
    (P, "7+5=13\n12-3=9\n9+8=17\n\\boxed{17}", ["slip", "sound", "sound"]),
    (P, "7+5=13\n13-3=9\n9+8=17\n\\boxed{17}", ["slip", "slip", "sound"]),
    # A box in front of the end must hold what the rest leads to; from the wrong 13 the rest -3+8 leads to 18.
    (P, "7+5=12\n\\boxed{12}", ["sound", "slip"]),
    (P, "7+5=12\n\\boxed{17}", ["sound"]),
    (P, "7+5=13\n\\boxed{18}", ["slip"]),
    (P, "\\boxed{17}", []),
    (P, "\\boxed{ 17 }", []),
    (P, "7+5=12\n12-3=9\n9+8=17\n\\boxed{71}", ["sound"] * 3 + ["slip"]),
    # A box with the right answer is never flawed.
    (P, "7+5=13\n13-3=10\n10+8=18\n\\boxed{17}", ["slip", "inherited", "inherited"]),
    # Numbers too long to be meant.
    (P, "7+5=" + "1" * 10_000, ["slip"]),
    (P, "\\boxed{" + "1" * 10_000 + "}", ["slip"]),
]


@pytest.mark.parametrize(("problem", "text", "expected"), KINDS)
def test_the_kinds_of_steps(problem, text, expected):
    assert kinds(problem, text) == expected


@pytest.mark.parametrize(
    "line", ["7+5", "12", "7+5=", "=12", "7+5=12=12", "7++5=12", "7*5=35", "\\boxed{17", "7+5=1,2"]
)
def test_a_line_that_tries_and_is_no_equation_is_a_slip_without_a_result(line):
    assert labels(P, line) == [(line, "slip", None)]


# ---- demonstrations


def test_demonstrations_go_on_from_their_mistakes():
    problem = Problem.parse(P)
    assert demonstration(problem, random.Random(0)) == "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}"
    # 7+5 without the carry is 2; 2-3 = -1; -1+8 has no carry.
    wrong = demonstration(problem, random.Random(0), misconception_rate=1.0)
    assert wrong == "7+5=2\n2-3=-1\n-1+8=7\n\\boxed{7}"
    cases = {(7, "+", 5): 2, (7, "+", 3): 0, (17, "+", 25): 32, (12, "+", 5): None, (-7, "+", 15): None}
    assert {case: misconception(*case) for case in cases} == cases
    assert misconception(17, "-", 8) is None


def test_demonstrations_err_as_often_as_asked_and_are_labelled_so():
    rng, counts = random.Random(0), {"slip": 0, "misconception": 0, "filler": 0}
    tempted = lines = 0
    for problem in ProblemSpace().draw(2000, "train"):
        text = demonstration(problem, rng, slip_rate=0.1, misconception_rate=0.4, filler_rate=0.2)
        for kind in kinds(problem.expression, text):
            counts[kind] = counts.get(kind, 0) + 1
        equations = re.findall(r"(-?\d+)([+-])(\d+)=", text)
        lines += len(equations)
        tempted += sum(misconception(int(a), sign, int(b)) is not None for a, sign, b in equations)
    assert lines == 8000
    assert counts["misconception"] / tempted == pytest.approx(0.4, abs=0.04)
    # A slip is drawn on the lines that show no misconception.
    assert counts["slip"] / (lines - counts["misconception"]) == pytest.approx(0.1, abs=0.015)
    assert counts["filler"] / lines == pytest.approx(0.2, abs=0.02)

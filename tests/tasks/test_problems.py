from __future__ import annotations

import itertools
import random
import re
import time

import pytest

from grail_lightning.tasks import ArithmeticTask, Problem, ProblemSpace, demonstration, misconception, split_of


def every_problem(space: ProblemSpace) -> set[str]:
    numbers = [str(n) for n in range(space.min_operand, space.max_operand + 1)]
    found = set()
    for n in range(space.min_terms, space.max_terms + 1):
        for operands in itertools.product(numbers, repeat=n):
            for signs in itertools.product(space.operators, repeat=n - 1):
                found.add(operands[0] + "".join(s + b for s, b in zip(signs, operands[1:], strict=True)))
    return found


def test_a_problem_knows_its_running_totals():
    problem = Problem.parse("3-12+100")
    # 3-12 = -9, -9+100 = 91
    assert problem.totals == (3, -9, 91)
    assert problem.answer == 91
    assert problem.expression == "3-12+100"


def test_draws_are_distinct_of_the_asked_kind_and_repeatable():
    space = ProblemSpace(min_terms=3, max_terms=4, min_operand=2, max_operand=11, operators="-")
    drawn = space.sample(500, "train", seed=3)
    assert drawn == space.sample(500, "train", seed=3)
    assert drawn != space.sample(500, "train", seed=4)
    assert len({p.expression for p in drawn}) == 500
    assert {len(p.operands) for p in drawn} == {3, 4}
    assert {b for p in drawn for b in p.operands} == set(range(2, 12))
    assert {sign for p in drawn for sign in p.operators} == {"-"}


def test_the_splits_share_no_problem_and_cover_the_space():
    space = ProblemSpace(min_terms=2, max_terms=3, max_operand=6)
    everything = every_problem(space)
    # 6² · 2 + 6³ · 2² = 72 + 864
    assert len(everything) == space.size == 936
    sizes = {split: sum(split_of(e) == split for e in everything) for split in ("train", "validation", "test")}
    parts = [{p.expression for p in space.sample(size, split, seed=5)} for split, size in sizes.items()]
    assert sum(map(len, parts)) == 936
    assert set().union(*parts) == everything


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_draws_from_a_large_space_are_of_the_asked_split(split):
    assert {split_of(p.expression) for p in ProblemSpace().sample(300, split)} == {split}


def test_the_split_of_a_problem_is_the_same_on_every_machine():
    # Fixed values: a salted hash would differ from run to run.
    fixed = {"7+5-3+8": "train", "8-1": "train", "9-9": "validation", "3+3": "validation", "3-8": "test"}
    assert {expression: split_of(expression) for expression in fixed} == fixed


def test_large_draws_are_quick():
    start = time.perf_counter()
    assert len(ProblemSpace().sample(20_000, "train")) == 20_000
    assert time.perf_counter() - start < 10


def test_a_space_that_is_too_small_is_refused_at_once():
    space = ProblemSpace(min_terms=2, max_terms=2, max_operand=3)
    with pytest.raises(ValueError, match=r"must not exceed what the test split holds \(\d problems\), but got 17"):
        space.sample(17, "test")
    with pytest.raises(ValueError, match=r"\(fewer than \d+ problems\), but got 10{12}\. Ask for fewer"):
        ProblemSpace().sample(10**12, "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_terms": 1}, "2 <= min_terms <= max_terms, but got 1 and 5"),
        ({"max_terms": 4}, "2 <= min_terms <= max_terms, but got 5 and 4"),
        ({"min_operand": -1}, "0 <= min_operand <= max_operand < 10\\^9, but got -1 and 9"),
        ({"operators": "*"}, r"`operators` must be '\+', '-' or '\+-', but got '\*'"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ProblemSpace(**options)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="`split` must be one of train, validation, test, but got 'dev'"):
        ProblemSpace().sample(1, "dev")


# ---- demonstrations


def test_a_demonstration_without_errors_is_the_right_chain():
    text = demonstration(Problem.parse("7+5-3+8"), random.Random(0))
    assert text == "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}"


def test_a_demonstration_goes_on_from_its_mistakes():
    text = demonstration(Problem.parse("7+5-3+8"), random.Random(0), misconception_rate=1.0)
    # 7+5 without the carry is 2; 2-3 = -1; -1+8 has no carry.
    assert text == "7+5=2\n2-3=-1\n-1+8=7\n\\boxed{7}"


def test_demonstrations_err_as_often_as_asked_and_are_labelled_so():
    task, rng, found = ArithmeticTask(), random.Random(0), {"slip": 0, "misconception": 0, "filler": 0}
    tempted = lines = 0
    for problem in ProblemSpace().sample(2000, "train"):
        text = demonstration(problem, rng, slip_rate=0.1, misconception_rate=0.4, filler_rate=0.2)
        for step in task.label_steps(text, task.prompt({"problem": problem.expression})):
            found[step.kind] = found.get(step.kind, 0) + 1
        equations = re.findall(r"(-?\d+)([+-])(\d+)=", text)
        lines += len(equations)
        tempted += sum(misconception(int(a), sign, int(b)) is not None for a, sign, b in equations)
    assert lines == 8000
    assert found["misconception"] / tempted == pytest.approx(0.4, abs=0.04)
    # A slip is drawn on the lines that show no misconception.
    assert found["slip"] / (lines - found["misconception"]) == pytest.approx(0.1, abs=0.015)
    assert found["filler"] / lines == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("a", "sign", "b", "wrong"),
    [
        (7, "+", 5, 2),
        (7, "+", 3, 0),
        (17, "+", 5, 12),
        (17, "+", 25, 32),
        (12, "+", 5, None),
        (-7, "+", 15, None),
        (17, "-", 8, None),
    ],
)
def test_the_misconception_forgets_the_carry(a, sign, b, wrong):
    assert misconception(a, sign, b) == wrong

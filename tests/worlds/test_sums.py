"""Chains of additions and subtractions: their splits, labels and demonstrations."""

import random

import pytest

from grail_lightning import ArithmeticTask
from grail_lightning.worlds.splits import split_of
from grail_lightning.worlds.sums.task import Problem, ProblemSpace, demonstration, misconception

TASK = ArithmeticTask()
P = "7+5-3+8"  # The problem of most cases: 7+5 = 12, 12-3 = 9, 9+8 = 17.


def labels(expression, text):
    """The kind of each step, and the text of its result."""
    steps = TASK.label_steps(text, TASK.prompt({"problem": expression}))
    return [f"{s.kind} {text[slice(*s.result)]}" if s.result else s.kind for s in steps]


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


def test_draws_are_of_the_asked_kind():
    space = ProblemSpace(min_terms=3, max_terms=4, min_operand=2, max_operand=11, operators="-")
    drawn = space.draw(500, "train", seed=3)
    assert {len(p.operands) for p in drawn} == {3, 4}
    assert {b for p in drawn for b in p.operands} == set(range(2, 12))
    assert {sign for p in drawn for sign in p.operators} == {"-"}


def test_the_splits_share_no_problem_and_cover_the_space():
    space = ProblemSpace(min_terms=2, max_terms=2, max_operand=9)
    everything = {f"{a}{sign}{b}" for a in range(1, 10) for b in range(1, 10) for sign in "+-"}
    sizes = {split: sum(split_of(e) == split for e in everything) for split in ("train", "validation", "test")}
    parts = [{p.expression for p in space.draw(size, split, seed=5)} for split, size in sizes.items()]
    assert sum(map(len, parts)) == 162
    assert set().union(*parts) == everything
    with pytest.raises(ValueError, match=f"The test split hardly has {sizes['test'] + 1} different problems: only"):
        space.draw(sizes["test"] + 1, "test")
    with pytest.raises(ValueError, match="`split` must be one of train, validation, test, but got 'dev'"):
        space.draw(1, "dev")


# ---- labels


def test_steps_are_lines_and_boxes_and_words_are_filler():
    text = "Then\n\n7+5=12\nFirst, 12 - 3 = 8\nso \\boxed{3}."
    steps = TASK.label_steps(text, TASK.prompt({"problem": P}))
    parts = ["Then", "7+5=12", "First, 12 - 3 = 8", "so ", "\\boxed{3}", "."]
    assert [text[step.start : step.stop] for step in steps] == parts
    assert [step.kind for step in steps] == ["filler", "sound", "slip", "filler", "slip", "filler"]


@pytest.mark.parametrize(
    ("problem", "text", "expected"),
    [
        # A right chain is sound, and its box no step.
        (P, "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}", ["sound 12", "sound 9", "sound 17"]),
        # A wrong result is a slip, and what follows from it is inherited; a forgotten carry (9+8 = 17) a misconception.
        (P, "7+5=13\n13-3=10\n10+8=18\n\\boxed{18}", ["slip 13", "inherited 10", "inherited 18"]),
        (P, "7+5=12\n12-3=9\n9+8=7\n\\boxed{7}", ["sound 12", "sound 9", "misconception 7"]),
        # What is miscopied is a slip where it stands: a total, a term, a sign.
        (P, "7+5=12\n11-3=8\n8+8=16\n\\boxed{16}", ["sound 12", "slip 11", "inherited 16"]),
        (P, "7+5=12\n12-4=8", ["sound 12", "slip -4"]),
        # A skipped term is one slip: the due total behind +8 is 17, so 12+8 = 20 is wrong; the box copies it.
        (P, "7+5=12\n12+8=20\n\\boxed{20}", ["sound 12", "slip +8"]),
        # 12+5 = 17 without a carry, and 17-5 = 12 is no addition: a result ten too small is a slip.
        ("12+5-5", "12+5=7\n7-5=2", ["slip 7", "inherited 2"]),
        # An error on an inherited total: 13-3 = 10; and 15+8 carries (5+8 = 13): 23 without the carry is 13.
        (P, "7+5=13\n13-3=11\n11+8=19", ["slip 13", "slip 11", "inherited 19"]),
        (P, "7+5=18\n18-3=15\n15+8=13", ["slip 18", "inherited 15", "misconception 13"]),
        # Negative totals: 2-9 = -7, -7+8 = 1.
        ("2-9+8", "2-9=-7\n-7+8=1\n\\boxed{1}", ["sound -7", "sound 1"]),
        # A repeated term: 9-3 = 6 takes the 3 away twice; 6+8 = 14 is due after it. And one line too many.
        (P, "7+5=12\n12-3=9\n9-3=6\n6+8=14\n\\boxed{14}", ["sound 12", "sound 9", "slip -3", "inherited 14"]),
        (P, "7+5=12\n12-3=9\n9+8=17\n17+1=18\n\\boxed{18}", ["sound 12", "sound 9", "sound 17", "slip +1"]),
        # Going back to the right total, and errors that cancel: 13-3 = 10, but 9 is what was due.
        (P, "7+5=13\n12-3=9\n9+8=17\n\\boxed{17}", ["slip 13", "sound 9", "sound 17"]),
        (P, "7+5=13\n13-3=9\n9+8=17\n\\boxed{17}", ["slip 13", "slip 9", "sound 17"]),
        # A box in front of the end must hold what the rest leads to; from the wrong 13 the rest -3+8 leads to 18.
        (P, "7+5=12\n\\boxed{12}", ["sound 12", "slip 12"]),
        (P, "7+5=13\n\\boxed{18}", ["slip 13"]),
        (P, "\\boxed{ 17 }", []),
        # A box with the right answer is never flawed.
        (P, "7+5=13\n13-3=10\n10+8=18\n\\boxed{17}", ["slip 13", "inherited 10", "inherited 18"]),
        # Numbers too long to be meant.
        (P, "7+5=" + "1" * 10_000, ["slip"]),
        (P, "\\boxed{" + "1" * 10_000 + "}", ["slip " + "1" * 10_000]),
        # A line that tries and is no equation.
        *((P, line, ["slip"]) for line in ("7+5", "12", "=12", "7+5=12=12", "7++5=12", "7*5=35", "\\boxed{17")),
    ],
    ids=lambda it: it[:20] if isinstance(it, str) else "",
)
def test_each_step_is_labelled_where_its_error_shows(problem, text, expected):
    assert labels(problem, text) == expected


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

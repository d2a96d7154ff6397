"""The second labelled world: labels of the steps of word problems, and the policy that was made for it."""

import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import grail_lightning
from grail_lightning.batch import Sampling
from grail_lightning.data import WordProblemData
from grail_lightning.policy import load_policy
from grail_lightning.tasks import WordProblemSpace, WordProblemTask, word_demonstration
from tests.runs import sampled

ASSET = Path(grail_lightning.__file__).parent / "assets" / "words"
SPACE = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
TASK = WordProblemTask()
# 8+5 = 13; Ben's 13+4 = 17, where "fewer" suggests a minus sign; 17-9 = 8.
ROW = {
    "problem": "Anna has 8 coins. Anna finds 5 coins. Then Anna has 4 fewer coins than Ben. Ben loses 9. How many?",
    "solution": "Anna has 8+5=13 coins.\nBen has 13+4=17 coins.\nBen has 17-9=8 coins.\n#### 8",
    "answer": "8",
    "suggested": "+--",
}


def labels(text, row=ROW):
    """Each step as (its text, its kind, the text of its result)."""
    steps = TASK.label_steps(text, TASK.prompt(row))
    return [(text[s.start : s.stop], s.kind, None if s.result is None else text[slice(*s.result)]) for s in steps]


def kinds(text, row=ROW):
    return [kind for _, kind, _ in labels(text, row)]


def test_the_worked_solution_is_sound_in_each_of_two_steps_a_line():
    assert labels(ROW["solution"]) == [
        ("Anna has 8+", "sound", "+"),
        ("5=13 coins.", "sound", "13"),
        ("Ben has 13+", "sound", "+"),
        ("4=17 coins.", "sound", "17"),
        ("Ben has 17-", "sound", "-"),
        ("9=8 coins.", "sound", "8"),
    ]


def test_every_worked_solution_is_sound_and_graded_as_right():
    space = WordProblemSpace(max_steps=4, operators="+-*", comparisons=True)
    for row in [*space.sample(300, "train"), *WordProblemSpace(max_steps=4, operators="+-*").sample(300, "test")]:
        assert kinds(row["solution"], row) == ["sound"] * 2 * row["steps"]
        assert TASK.answer(row["solution"]) == TASK.prompt(row).reference == row["answer"]


def test_the_operation_that_the_words_suggest_is_a_misconception_and_its_result_is_inherited():
    # 13-4 = 9, 9-9 = 0
    assert labels("Anna has 8+5=13 coins.\nBen has 13-4=9 coins.\nBen has 9-9=0 coins.\n#### 0")[2:] == [
        ("Ben has 13-", "misconception", "-"),
        ("4=9 coins.", "inherited", "9"),
        ("Ben has 9-", "inherited", "-"),
        ("9=0 coins.", "inherited", "0"),
    ]


def test_an_operation_that_no_word_suggests_is_a_slip():
    assert labels("8-5=3")[0] == ("8-", "slip", "-")
    assert labels("8*5=40")[:2] == [("8*", "slip", "*"), ("5=40", "inherited", "40")]
    without = {name: value for name, value in ROW.items() if name != "suggested"}
    assert kinds("8+5=13\n13-4=9", without) == ["sound", "sound", "slip", "inherited"]


def test_results_are_slips_or_forgotten_carries():
    # 8+5 carries: 13-10 = 3. Behind the slip 12, 12+4 = 16 is right in itself.
    assert kinds("8+5=3\n3+4=7\n7-9=-2\n#### -2") == ["sound", "misconception", *["inherited"] * 4]
    assert kinds("8+5=12\n12+4=16\n16-9=6") == ["sound", "slip", "inherited", "inherited", "inherited", "slip"]
    # A forgotten carry behind a wrong operation: 13-4 has none, so 3 is a slip; 8+5 = 3 is one.
    assert kinds("8+5=13\n13-4=3")[2:] == ["misconception", "slip"]


def test_miscopied_numbers_are_slips_where_they_stand():
    assert labels("8+5=13\n12+4=16")[2:] == [("12+", "slip", "12"), ("4=16", "inherited", "16")]
    assert labels("8+6=14")[1] == ("6=14", "slip", "6")


def test_skipped_and_further_steps_are_slips():
    # The due step is +4; "-" is what its words suggest, but the 9 is that of the step behind it, with which it goes on.
    assert kinds("8+5=13\n13-9=4\n#### 4") == ["sound", "sound", "slip", "slip"]
    assert kinds(ROW["solution"].replace("####", "8+1=9\n####"))[6:] == ["slip", "inherited"]


def test_an_answer_is_a_step_only_if_it_does_not_follow():
    assert labels("8+5=13\n#### 13") == [("8+", "sound", "+"), ("5=13", "sound", "13"), ("#### 13", "slip", "13")]
    assert kinds("8+5=13\n#### 8") == ["sound", "sound"]
    assert kinds("8+5=12\n#### 7") == ["sound", "slip"], "12+4-9 = 7"


def test_words_are_filler_and_what_is_no_equation_is_a_slip():
    assert labels("Let me go on\n\nSo Anna has 8 + 5 = 13 coins, and") == [
        ("Let me go on", "filler", None),
        ("So Anna has 8 +", "sound", "+"),
        (" 5 = 13 coins, and", "sound", "13"),
    ]
    for line in ("Anna has 13 coins.", "8+5", "8+5=13=13", "8++5=13", "8/5=1", "= 13"):
        assert labels(line) == [(line, "slip", None)]


def test_a_solution_that_is_no_chain_is_not_labelled():
    for solution in ("The answer is 8.", "8+5=13\n12+4=16\n#### 16", "8+5=14\n#### 14", ""):
        assert TASK.label_steps("8+5=13", TASK.prompt(ROW | {"solution": solution})) is None
    bare = {"problem": "Anna has 8 coins.", "answer": "8"}
    assert TASK.label_steps("8+5=13", TASK.prompt(bare)) is None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*=\n #.coinsé\r\0", max_size=80) | st.text(max_size=40))
@example("#### #### 8+5=13\n8*5=1")
def test_any_text_is_labelled_and_its_steps_are_ordered_ranges_of_it(text):
    steps = TASK.label_steps(text, TASK.prompt(ROW))
    borders = [border for step in steps for border in (step.start, step.stop)]
    assert borders == sorted(borders)
    assert all(0 <= step.start < step.stop <= len(text) for step in steps)
    assert all(s.start <= s.result[0] <= s.result[1] <= s.stop for s in steps if s.result is not None)


@pytest.mark.parametrize(
    "piece", ["8+5=13\n", "1", "-", "a", "7*", "#### 1", "####", "\n", " ", "999999999*999999999=1\n"]
)
def test_labelling_takes_linear_time(piece):
    text = piece * (400_000 // len(piece))
    start = time.perf_counter()
    TASK.label_steps(text, TASK.prompt(ROW))
    # Linear: under a second. Quadratic: hours.
    assert time.perf_counter() - start < 20


# ---- comparisons


def test_half_of_the_comparisons_suggest_the_wrong_operation():
    problems = SPACE.draw(1000, "train")
    steps = [step for problem in problems for step in zip(problem.chain.operators, problem.suggested, strict=True)]
    compared = sum(problem.text.count(" than ") for problem in problems)
    assert compared / len(steps) == pytest.approx(0.5, abs=0.04)
    assert sum(sign != hint for sign, hint in steps) / compared == pytest.approx(0.5, abs=0.05)


def test_the_words_of_comparisons_mean_the_operation_of_the_solution():
    """Read anew from the text: who has how many, and the keyword's own operation."""
    for problem in SPACE.draw(500, "train"):
        first, *events, question = problem.sentences
        owner, total = re.match(r"(\w+) has (\d+) ", first).groups()
        known = {owner: int(total)}
        for event, sign, hint in zip(events, problem.chain.operators, problem.suggested, strict=True):
            match = re.fullmatch(r"(?:Then )?(\w+) has (\d+) (more|fewer) \w+ than (\w+)\.", event)
            number = int(re.search(r"\d+", event)[0])
            if match is None:
                known[owner] += number if sign == "+" else -number
                assert hint == sign
                continue
            one, _, word, other = match.groups()
            assert hint == {"more": "+", "fewer": "-"}[word]
            change = number if word == "more" else -number
            assert (one in known) != (other in known), "exactly one of both is known"
            if other in known:
                owner, known[one] = one, known[other] + change
            else:
                owner, known[other] = other, known[one] - change
        assert question == f"How many {problem.items} does {owner} have now?"
        assert known[owner] == problem.chain.answer > 0


def test_demonstrated_mistakes_are_labelled_as_what_they_are():
    for seed, problem in enumerate(SPACE.draw(300, "train")):
        row, hints = problem.row(), [*zip(problem.chain.operators, problem.suggested, strict=True)]
        misled = labels(word_demonstration(problem, random.Random(seed), 0.0, 1.0, 0.3), row)
        steps = [(text, kind) for text, kind, _ in misled if kind != "filler"]
        assert [kind == "misconception" for text, kind in steps[::2]] == [sign != hint for sign, hint in hints]
        assert {kind for _, kind in steps} <= {"sound", "misconception", "inherited"}
        slipped = labels(word_demonstration(problem, random.Random(seed), 1.0, 0.0), row)
        assert [kind for _, kind, _ in slipped[1::2]] == ["slip"] * len(hints)
        assert {kind for _, kind, _ in slipped[::2]} <= {"sound", "inherited"}


# ---- the packaged policy


def test_the_packaged_policy_is_small_and_right_on_40_to_55_percent_of_its_samples():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) <= 4 * 2**20
    policy = load_policy("words").eval()
    data = WordProblemData(num_val=400, seed=1, problems=SPACE, task=TASK)
    (asked,) = data.load("val")
    batch = sampled(policy, list(asked.prompts), 1, Sampling(max_response_length=64), seed=0)
    right = [TASK.answer(text) == p.reference for text, p in zip(batch.texts, batch.prompts, strict=True)]
    # The standard error of 400 samples is 2.5 points.
    assert 0.35 <= sum(right) / len(right) <= 0.6
    found = {s.kind for text, p in zip(batch.texts, batch.prompts, strict=True) for s in TASK.label_steps(text, p)}
    assert {"sound", "slip", "misconception", "inherited"} <= found

"""The packaged policy `numbers`: what it is asked, and how often it is right on questions that no demonstration has."""

import random
from pathlib import Path

import pytest

import grail_lightning
from grail_lightning import MathTask
from grail_lightning.answers import Boxed
from grail_lightning.core.policy.load import load_policy
from tests.benchmark_modules import script
from tests.worlds.test_both_worlds import rollouts

making = script("make_numbers_policy")
TASK = MathTask(instruction="", answer=Boxed(evaluated=True))


def prompts_of(kind, number):
    rows = [{"problem": question.text, "answer": str(question.answer)} for question in making.held_out(kind)]
    return [TASK.prompt(row) for row in rows[:number]]


@pytest.mark.parametrize("kind", making.KINDS)
def test_it_is_often_right_and_often_wrong(kind):
    folder = Path(grail_lightning.__file__).parent / "worlds" / "assets" / "numbers"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4 * 2**20
    batch, right = rollouts(load_policy("numbers").eval(), prompts_of(kind, 100), length=96)
    assert 0.25 <= right <= 0.8  # The standard error of 100 samples is 5 points.
    assert float(batch.finished.float().mean()) > 0.97


@pytest.mark.parametrize("kind", making.KINDS)
def test_demonstrations_without_mistakes_are_right(kind):
    rates = making.Recipe(**dict.fromkeys(making.RATES, 0))
    for question in making.held_out(kind):
        text = making.demonstrate(question, random.Random(0), rates)
        assert text.endswith(f"\\boxed{{{question.answer}}}"), question


def test_numbers_are_compared_by_their_first_characters_at_the_rate_of_misconceptions_alone():
    draws = random.Random(0)
    assert {making.compared(9, 12, draws, 0.0, 1.0) for _ in range(20)} == {">"}
    assert {making.compared(9, 12, draws, 0.0, 0.0) for _ in range(20)} == {"<"}
    assert {making.compared(9, 12, draws, 1.0, 0.0) for _ in range(20)} == {">"}
    assert {making.compared(12, 15, draws, 0.0, 1.0) for _ in range(20)} == {"<"}, "no first character misleads"


def test_questions_of_the_splits_differ():
    train = {question.text for _, question in zip(range(3000), making.drawn("train", 0), strict=False)}
    assert not train & {question.text for kind in making.KINDS for question in making.held_out(kind)}

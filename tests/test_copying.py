"""A policy that puts the question into its box earns nothing where answers have to be worked out."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from grail_lightning import (
    ArithmeticTask,
    FewShot,
    MathData,
    MathTask,
    WordProblemData,
    WordProblemTask,
    grade_answers,
    read_samples,
)
from grail_lightning.answers import Boxed, Marker, Pattern, Verifier
from tests.app.callbacks.scripted import scalars
from tests.shell import EVALUATED, RUN, SHORT, main

COPIED = {
    "8": "7+5-3+8-9",
    "1776": "37*48",
    "1/3": r"\int_0^1 x^2\,dx",
    "55": r"\sum_{k=1}^{10} k",
}
COPYING = "--model.engine=tests.copying.Copying"  # of each group the first response alone is worked out


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=1) as opened:
        yield opened


def _rewards(task, texts, references, verifier):
    prompts = [replace(task.prompt({"problem": "7+5", "answer": "12"}), reference=gold) for gold in references]
    verdicts = grade_answers(texts, prompts, verifier)
    return task.reward(texts, prompts, verdicts), [verdict.status for verdict in verdicts]


def test_the_quickstart_s_task_rewards_no_question_in_the_box(verifier):
    texts = [rf"\boxed{{{text}}}" for text in [*COPIED.values(), *COPIED]]
    rewards, statuses = _rewards(ArithmeticTask(), texts, [*COPIED] * 2, verifier)
    assert rewards == [0.0] * 4 + [1.0] * 4
    assert statuses == ["unevaluated"] * 4 + ["right"] * 4


@pytest.mark.parametrize("form", [Boxed, Marker, lambda **options: Pattern(r"(?:\{|# )(.+?)\}?$", **options)])
def test_other_tasks_reward_it_as_published_graders_do_unless_their_form_is_told_otherwise(form, verifier):
    texts = [f"#### {text}" if form is Marker else rf"\boxed{{{text}}}" for text in ["7+5", "12"]]
    for options, rewards in (({}, [1.0, 1.0]), ({"evaluated": True}, [0.0, 1.0])):
        task = MathTask(answer=form(**options), instruction="")
        assert _rewards(task, texts, ["12", "12"], verifier)[0] == rewards


def test_generated_worlds_of_numbers_ask_for_values():
    assert all(task.evaluated for task in (ArithmeticTask(), WordProblemTask(), WordProblemData().task))
    assert not MathTask().evaluated


@pytest.mark.parametrize("compare", ["text", "exact", "relaxed"])
def test_answers_that_are_compared_as_text_are_not_worked_out_and_are_not_asked_to_be(compare, verifier):
    with pytest.raises(ValueError, match=rf"`compare` must be math with `evaluated: true` .* but got '{compare}'"):
        MathTask(answer=Boxed(evaluated=True), compare=compare)
    task = MathTask(compare=compare)
    assert _rewards(task, [r"\boxed{7+5}"] * 2, ["7+5", "12"], verifier)[1] == ["right", "wrong"]


def test_a_worked_example_is_not_taken_whose_answer_is_not_worked_out():
    rows = [{"problem": "Compute 7+5.", "answer": "12", "solution": r"It is \boxed{7+5}."}] * 3
    for evaluated in (False, True):
        data = MathData(train=rows, task=MathTask(answer=Boxed(evaluated=evaluated)), few_shot=FewShot(number=1))
        if evaluated:
            with pytest.raises(ValueError, match="must be a text that ends with the answer '12'"):
                data.load("train")
        else:
            with pytest.raises(ValueError, match=r"All rows of .* serve as worked examples"):  # it is one of them
                data.load("train")


@pytest.mark.usefixtures("empty_folder")
def test_a_run_whose_policy_copies_the_question_learns_that_it_is_wrong():
    options = ["--evaluation.num_samples=2", "--model.credit=Uniform", COPYING]
    main(["fit", *SHORT, *options, "--trainer.callbacks+=KeepRollouts"])
    logged = {name: [value for _, value in points] for name, points in scalars(RUN).items()}
    assert logged["train/reward"] == [0.25]  # one in four of a batch of two optimiser steps
    assert logged["train/verdict/unevaluated"] == [0.75]
    assert logged["train/verdict/right"] == [0.25]
    assert set(logged["val/verdict/unevaluated"]) == {0.5}
    assert set(logged["val/accuracy"]) == {0.5}
    (file,) = RUN.glob("rollouts/*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert {(row["status"], row["reward"]) for row in rows} == {("right", 1.0), ("unevaluated", 0.0)}

    main(["test", *EVALUATED, *options, "--ckpt_path=last"])
    samples = list(read_samples(RUN / "test" / "samples"))
    assert sorted({(sample["sample"], sample["status"], sample["correct"]) for sample in samples}) == [
        (0, "right", True),
        (1, "unevaluated", False),
    ]

    main(["predict", *EVALUATED, *options, "--ckpt_path=last"])
    rows = pq.read_table(RUN / "predictions.parquet").to_pylist()
    assert {row["correct"] for row in rows if row["response"].count("+") + row["response"].count("-") > 1} == {False}

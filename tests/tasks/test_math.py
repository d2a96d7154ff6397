import pytest

from grail_lightning.answers import Verdict
from grail_lightning.tasks.math import MathTask

ROW = {"problem": "What is $1+1$?", "answer": " 2 ", "level": 1}


def test_the_prompt_is_the_problem_and_the_instruction_with_its_backslash():
    prompt = MathTask().prompt(ROW)
    assert prompt.messages == [
        {
            "role": "user",
            "content": "What is $1+1$? Please reason step by step, and put your final answer within \\boxed{}.",
        }
    ]
    assert prompt.reference == "2"
    assert prompt.columns == ROW


def test_a_system_prompt_comes_first_and_the_instruction_can_be_changed():
    messages = MathTask(instruction="\nBox it.", system_prompt="Be brief.").prompt(ROW).messages
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is $1+1$?\nBox it."},
    ]
    assert MathTask(instruction="").prompt(ROW).messages == [{"role": "user", "content": ROW["problem"]}]


def test_a_backspace_for_a_backslash_is_found():
    with pytest.raises(ValueError, match=r"`instruction` must not hold a backspace character.*use single quotes"):
        MathTask(instruction="within \boxed{}.")


def test_a_row_without_problem_or_answer_is_an_error():
    with pytest.raises(ValueError, match=r"columns `problem` and `answer`, but got only \['question'\]"):
        MathTask().prompt({"question": "1+1?"})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{1}, no: \boxed{ 2 }.", "2"),  # the last one
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # braces inside
        (r"\boxed{a \boxed{b}}", r"a \boxed{b}"),  # the outer one
        (r"\boxed{3} and then \boxed{4", "3"),  # the last complete one
        (r"\boxed{}", ""),
        ("The answer is 4.", None),
    ],
)
def test_the_answer_is_what_stands_in_the_last_complete_box(text, answer):
    assert MathTask().answer(text) == answer


def test_the_reward_is_one_for_a_right_answer_and_zero_otherwise():
    task = MathTask()
    right = Verdict(correct=True, status="right", layer="exact", gold="2", prediction="2")
    wrong = Verdict(correct=False, status="wrong", layer="numeric", gold="2", prediction="3")
    verdicts = [right, wrong, Verdict.missing("2")]
    assert task.reward(["", "", ""], [task.prompt(ROW)] * 3, verdicts) == [1.0, 0.0, 0.0]
    assert task.label_steps(r"\boxed{2}", task.prompt(ROW)) is None

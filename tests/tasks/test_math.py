import pytest

from grail_lightning.answers import Boxed, LastNumber, Marker, Pattern, Verdict
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.rewards import RewardSpec

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


@pytest.mark.parametrize(
    ("form", "instruction"),
    [
        (Boxed(), "put your final answer within \\boxed{}."),
        (LastNumber(), "end with the answer as a number."),
        (Marker("Answer:"), "on a last line after Answer:"),
    ],
)
def test_the_default_instruction_asks_for_the_form_of_the_answer(form, instruction):
    assert MathTask(answer=form).prompt(ROW).messages[0]["content"].endswith(instruction)


def test_a_pattern_needs_an_instruction():
    with pytest.raises(ValueError, match="`instruction` must be given with `answer: Pattern`"):
        MathTask(answer=Pattern(r"is (\d+)"))
    assert MathTask(answer=Pattern(r"is (\d+)"), instruction=" Say 'is N'.").answer("it is 7") == "7"


def test_references_that_are_worked_solutions_are_reduced_to_their_answer():
    row = {"problem": "How many?", "answer": "48 / 2 = 24 clips.\n#### 72"}
    assert MathTask(answer=Marker()).prompt(row).reference == "72"


def test_an_unknown_comparison_is_an_error():
    with pytest.raises(ValueError, match="`compare` must be one of math, text, exact, but got 'words'"):
        MathTask(compare="words")


def test_a_format_reward_follows_the_form_of_the_answer():
    task = MathTask(rewards=[RewardSpec(function="answer_format")], answer=Marker())
    prompt, wrong = task.prompt(ROW), Verdict(correct=False, status="wrong", layer="none", gold="2", prediction="")
    texts = ["#### 3", "#### **3**\n", "#### 3\nor so", "3", r"\boxed{3}"]
    assert task.reward(texts, [prompt] * 5, [wrong] * 5, lengths=[1] * 5) == [1, 1, 0, 0, 0]

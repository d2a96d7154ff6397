import pytest

from grail_lightning.answers import Boxed, LastNumber, Marker, Pattern, Verdict
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.rewards import RewardSpec

ROW = {"problem": "What is $1+1$?", "answer": " 2 ", "level": 1}


def test_the_prompt_is_the_problem_and_the_instruction_with_its_backslash():
    prompt = MathTask().prompt(ROW)
    content = "What is $1+1$? Please reason step by step, and put your final answer within \\boxed{}."
    assert prompt.messages == [{"role": "user", "content": content}]
    assert (prompt.reference, prompt.columns) == ("2", ROW)
    assert MathTask(instruction="\nBox it.", system_prompt="Be brief.").prompt(ROW).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is $1+1$?\nBox it."},
    ]
    assert MathTask(instruction="").prompt(ROW).messages == [{"role": "user", "content": ROW["problem"]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instruction": "within \boxed{}."}, r"`instruction` must not hold a backspace character.*use single quotes"),
        ({"answer": Pattern(r"is (\d+)")}, "`instruction` must be given with `answer: Pattern`"),
        ({"compare": "words"}, "`compare` must be one of math, text, exact, relaxed, but got 'words'"),
        ({}, r"columns `problem` and `answer`, but got only \['question'\]"),
    ],
)
def test_what_cannot_be_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        MathTask(**options).prompt({"question": "1+1?"})


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


def test_references_and_format_rewards_follow_the_form_of_the_answer():
    task = MathTask(rewards=[RewardSpec(function="answer_format")], answer=Marker())
    prompt = task.prompt(ROW | {"answer": "1 + 1\n#### 2"})
    wrong = Verdict(correct=False, status="wrong", layer="none", gold="2", prediction="")
    assert prompt.reference == "2"
    texts = ["#### 3", "#### **3**\n", "#### 3\nor so", "3", r"\boxed{3}"]
    assert task.reward(texts, [prompt] * 5, [wrong] * 5, lengths=[1] * 5) == [1, 1, 0, 0, 0]

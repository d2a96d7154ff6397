import pytest

from grail_lightning.answers import Boxed, LastNumber, Marker, Pattern, Verdict
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.rewards import RewardSpec

ROW = {"problem": "What is $1+1$?", "answer": " 2 ", "level": 1}


@pytest.mark.parametrize(
    ("options", "instruction"),
    [
        ({"answer": Boxed()}, r" Please reason step by step, and put your final answer within \boxed{}."),
        ({"answer": LastNumber()}, "end with the answer as a number."),
        ({"answer": Marker("Answer:")}, "on a last line after Answer:"),
        ({"instruction": "\nBox it."}, "\nBox it."),
        ({"instruction": ""}, ROW["problem"]),
    ],
)
def test_the_prompt_is_the_problem_with_an_instruction_that_asks_for_the_form_of_the_answer(options, instruction):
    prompt = MathTask(system_prompt="Be brief.", **options).prompt(ROW)
    system, user = prompt.messages
    assert (system, user["role"]) == ({"role": "system", "content": "Be brief."}, "user")
    assert user["content"].startswith(ROW["problem"])
    assert user["content"].endswith(instruction)
    assert (prompt.reference, prompt.columns) == ("2", ROW)
    assert len(MathTask(**options).prompt(ROW).messages) == 1


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


def test_references_and_format_rewards_follow_the_form_of_the_answer():
    task = MathTask(rewards=[RewardSpec(function="answer_format")], answer=Marker())
    prompt = task.prompt(ROW | {"answer": "1 + 1\n#### 2"})
    wrong = Verdict(correct=False, status="wrong", layer="none", gold="2", prediction="")
    assert prompt.reference == "2"
    texts = ["#### 3", "#### **3**\n", "#### 3\nor so", "3", r"\boxed{3}"]
    assert task.reward(texts, [prompt] * 5, [wrong] * 5, lengths=[1] * 5) == [1, 1, 0, 0, 0]

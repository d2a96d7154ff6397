"""Worked examples before each question."""

import pytest

from grail_lightning.answers import LastNumber, Marker
from grail_lightning.data import ArithmeticData, DatasetSpec, FewShot, MathData, WordProblemData
from grail_lightning.data.few_shot import Example, with_examples
from grail_lightning.policy.tokenizer import encode_prompt
from grail_lightning.tasks import MathTask
from tests.data.recorder import write

ROWS = [
    {"problem": f"{k}+{k}?", "answer": str(2 * k), "solution": f"{k} + {k} = {2 * k}\n#### {2 * k}"} for k in range(6)
]
TASK = MathTask(answer=Marker(), instruction=" Work it out.", system_prompt="Be brief.")


def load(tmp_path, split="train", rows=ROWS, task=TASK, val=None, **options):
    data = MathData(train=write(tmp_path, rows), val=val, task=task, few_shot=FewShot(**options))
    return data.load(split)[0].prompts


def test_examples_are_turns_before_the_question(tmp_path):
    prompts = load(tmp_path)
    assert prompts[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0+0? Work it out."},
        {"role": "assistant", "content": "0 + 0 = 0\n#### 0"},
        {"role": "user", "content": "1+1? Work it out."},
        {"role": "assistant", "content": "1 + 1 = 2\n#### 2"},
        {"role": "user", "content": "2+2? Work it out."},
    ]
    assert prompts[0].reference == "4"


def test_examples_as_text_need_no_chat_template(tmp_path):
    task = MathTask(answer=Marker(), instruction="")
    template = "Q: {problem}\nA: {solution}"
    prompts = load(tmp_path, task=task, number=1, style="text", template=template)
    assert prompts[0].messages == "Q: 0+0?\nA: 0 + 0 = 0\n#### 0\n\nQ: 1+1?\nA:"


def test_texts_are_not_searched_for_the_names_of_the_template():
    few_shot = FewShot(number=1, style="text")
    prompt = MathTask(instruction="").prompt({"problem": "What is {solution} in {problem}?", "answer": "2"})
    made = with_examples(prompt, [Example("Say {problem}", "{solution} {problem}")], few_shot)
    assert made.messages == "Say {problem}\n{solution} {problem}\n\nWhat is {solution} in {problem}?\n"


def test_rows_that_are_examples_are_neither_trained_on_nor_evaluated(tmp_path):
    assert [prompt.reference for prompt in load(tmp_path)] == ["4", "6", "8", "10"]
    same = write(tmp_path, ROWS)
    assert [prompt.reference for prompt in load(tmp_path, split="val", val=same)] == ["4", "6", "8", "10"]


def test_another_dataset_may_hold_the_examples(tmp_path):
    (tmp_path / "examples").mkdir()
    examples = write(tmp_path / "examples", ROWS)
    prompts = load(tmp_path, number=1, dataset=DatasetSpec(str(examples), where={"answer": "10"}))
    assert prompts[0].messages[1]["content"] == "5+5? Work it out."
    assert len(prompts) == 6


def test_the_length_limit_counts_the_examples(tmp_path, arithmetic):
    data = MathData(train=write(tmp_path, ROWS), task=TASK, few_shot=FewShot(style="text"), max_prompt_length=20)
    data.encode = lambda messages: encode_prompt(arithmetic.tokenizer, messages)
    with pytest.raises(ValueError, match=r"4 of 4 prompts .* longer than 20 tokens \(`data.max_prompt_length`\)"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {"number": 7}, "`few_shot.number` must not exceed the 6 rows"),
        (ROWS, {"number": 6}, "All rows of .* serve as worked examples"),
        (ROWS, {"solution": "proof"}, r"line 1: the column `proof` must hold the worked solution.*but got None"),
        (
            [ROWS[0] | {"solution": "It is 0."}, *ROWS],
            {},
            r"line 1: .* must end with the answer '0'.*no answer was found",
        ),
        ([ROWS[0] | {"solution": "#### 3"}, *ROWS], {}, r"must end with the answer '0'.*the answer there is '3'"),
        (ROWS, {"number": 0}, "`few_shot.number` must be at least 1"),
        (ROWS, {"style": "poem"}, "`few_shot.style` must be turns or text, but got 'poem'"),
        (ROWS, {"template": "{solution}{problem}"}, r"must contain \{problem\} and after it \{solution\}"),
        (ROWS, {"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_examples_that_cannot_be_are_an_error_before_training(rows, options, message, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        load(tmp_path, rows=rows, **options)


def test_without_training_data_the_examples_need_a_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"`few_shot.dataset` must name the dataset"):
        MathData(test=write(tmp_path, ROWS), few_shot=FewShot()).load("test")


def test_an_answer_that_is_text_is_compared_as_text(tmp_path):
    rows = [{"problem": "Capital?", "answer": "Paris", "solution": "#### PARIS"}] * 3
    task = MathTask(answer=Marker(), instruction="", compare="text")
    assert load(tmp_path, rows=rows, task=task, number=1)[0].reference == "Paris"


def test_prompts_that_are_text_take_no_turns():
    prompt = ArithmeticData(num_train=1).load("train")[0].prompts[0]
    with pytest.raises(ValueError, match=r"`few_shot.style: turns` needs prompts that are conversations"):
        with_examples(prompt, [Example("Compute 1+1.", "1+1=2")], FewShot())


def test_generated_word_problems_have_solutions_that_serve_as_examples():
    for task in (None, MathTask(answer=LastNumber())):
        data = WordProblemData(num_train=20, num_val=5, few_shot=FewShot(number=3), task=task)
        train, val = data.load("train")[0].prompts, data.load("val")[0].prompts
        assert (len(train), len(val)) == (17, 5)
        assert len(train[0].messages) == 7
        assert train[0].messages[:6] == val[0].messages[:6]

"""What holds in both worlds: any text is labelled, in linear time, and the packaged policy errs as it should."""

import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import grail_lightning
from grail_lightning.batch import Sampling
from grail_lightning.data import ArithmeticData, WordProblemData
from grail_lightning.policy import load_policy, load_tokenizer
from grail_lightning.tasks import ArithmeticTask
from tests.runs import sampled
from tests.tasks import test_words

ARITHMETIC, WORDS = ArithmeticTask(), test_words.TASK
PROMPTS = ARITHMETIC.prompt({"problem": "7+5-3+8"}), WORDS.prompt(test_words.ROW)
DATA = {
    "arithmetic": ArithmeticData(num_val=400, seed=1, task=ARITHMETIC),
    "words": WordProblemData(num_val=400, seed=1, problems=test_words.SPACE, task=WORDS),
}
PIECES = ["7+5=12\n", "8+5=13\n", "1", "-", "a", "7+", "7*", "\\boxed{1}", "\\boxed{", "{", "\n", " ", "\\boxed{}7"]
PIECES += ["#### 1", "####", "999999999*999999999=1\n"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-*=\n \\boxed{}#.coins٣é\r\0", max_size=80) | st.text(max_size=40))
@example("\\boxed{7+5=12\n}")
@example("\\boxed{\\boxed{1}}7+5=12")
@example("#### #### 8+5=13\n8*5=1")
def test_any_text_is_labelled_and_its_steps_are_ordered_ranges_of_it(text):
    for prompt in PROMPTS:
        steps = prompt.task.label_steps(text, prompt)
        borders = [border for step in steps for border in (step.start, step.stop)]
        assert borders == sorted(borders)
        assert all(0 <= step.start < step.stop <= len(text) for step in steps)
        assert all(s.start <= s.result[0] <= s.result[1] <= s.stop for s in steps if s.result is not None)


@pytest.mark.parametrize("piece", PIECES)
def test_labelling_takes_linear_time(piece):
    text = piece * (100_000 // len(piece))
    start = time.perf_counter()
    for prompt in PROMPTS:
        prompt.task.label_steps(text, prompt)
    assert time.perf_counter() - start < 20  # Linear: under a second. Quadratic: many minutes.


@pytest.mark.parametrize("world", DATA)
def test_the_packaged_policy_is_small_and_right_on_30_to_60_percent_of_its_samples(world):
    folder = Path(grail_lightning.__file__).parent / "assets" / world
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4 * 2**20
    policy = load_policy(world).eval()
    (asked,) = DATA[world].load("val")
    batch = sampled(policy, list(asked.prompts), 1, Sampling(max_response_length=64), seed=0)
    pairs = [(prompt.task, text, prompt) for text, prompt in zip(batch.texts, batch.prompts, strict=True)]
    right = [task.answer(text) == prompt.reference for task, text, prompt in pairs]
    # The standard error of 400 samples is 2.5 points.
    low, high = {"arithmetic": (0.30, 0.50), "words": (0.35, 0.60)}[world]
    assert low <= sum(right) / len(right) <= high
    labelled = {step.kind for task, text, prompt in pairs for step in task.label_steps(text, prompt)}
    assert {"sound", "slip", "misconception", "inherited"} <= labelled


def test_any_text_survives_the_tokenizer():
    tokenizer = load_tokenizer("arithmetic")

    @settings(max_examples=200, deadline=None)
    @given(st.text())
    @example("\\boxed{17} \\boxed{-3}\r\n\t👩‍👩‍👧 ü 한국어 \x00 1234 ٣")
    @example("".join(map(chr, range(0x20, 0x250))))
    def survives(text):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text

    survives()
    # Bytes that are no UTF-8 by themselves have tokens as well: 256 of one byte each.
    assert len([token for token in tokenizer.get_vocab() if len(token) == 1]) == 256
    pieces = tokenizer.tokenize("Compute 12-3.12-3=-9\n\\boxed{-9}")
    assert pieces == ["ComputeĠ", *"12-3.12-3=-9", "Ċ", "\\boxed", *"{-9}"]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id

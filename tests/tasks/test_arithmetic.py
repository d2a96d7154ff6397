from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import grail_lightning
from grail_lightning.answers import Verdict
from grail_lightning.tasks import ArithmeticTask, ProblemSpace
from grail_lightning.tasks.base import Prompt, Step

ASSET = Path(grail_lightning.__file__).parent / "assets" / "arithmetic"
TASK = ArithmeticTask()


def prompt_of(expression: str) -> Prompt:
    return TASK.prompt({"problem": expression})


def labels(expression: str, text: str) -> list[tuple[str, str, str | None]]:
    """Each step as (its text, its kind, the text of its result)."""
    steps = TASK.label_steps(text, prompt_of(expression))
    return [(text[s.start : s.stop], s.kind, None if s.result is None else text[slice(*s.result)]) for s in steps]


def kinds(expression: str, text: str) -> list[str]:
    return [kind for _, kind, _ in labels(expression, text)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSET)


# The problem of most cases: 7+5 = 12, 12-3 = 9, 9+8 = 17.
P = "7+5-3+8"


def test_a_row_becomes_a_prompt_with_its_reference():
    prompt = TASK.prompt({"problem": P, "level": 3})
    assert prompt.messages == "Compute 7+5-3+8."
    assert prompt.reference == "17"
    assert prompt.task is TASK
    assert prompt.columns == {"problem": P, "level": 3}


@pytest.mark.parametrize("wrong", ["", "7", "7*5", "7+", "+7+5", "7+-5", "7 + 5", "٣+٤", "1" * 5000 + "+1"])
def test_what_is_no_expression_is_refused(wrong):
    with pytest.raises(ValueError, match=r"joined by \+ and -, such as '7\+5-3\+8', but got"):
        TASK.prompt({"problem": wrong})


def test_a_row_without_a_problem_is_refused():
    with pytest.raises(ValueError, match=r"must have the column `problem`, but got \['answer'\]"):
        TASK.prompt({"answer": 3})


def test_the_answer_is_what_stands_in_the_last_complete_box():
    assert TASK.answer("\\boxed{12}\nno: \\boxed{17}") == "17"
    assert TASK.answer("\\boxed{17} \\boxed{12") == "17"
    assert TASK.answer("17") is None


def test_the_reward_is_one_for_right_and_zero_for_wrong():
    verdicts = [
        Verdict(correct=True, status="right", layer="string", gold="17", prediction="17"),
        Verdict(correct=False, status="wrong", layer="number", gold="17", prediction="71"),
    ]
    assert TASK.reward(["\\boxed{17}", "\\boxed{71}"], [prompt_of(P)] * 2, verdicts) == [1.0, 0.0]


# ---- labels


def test_a_right_chain_is_sound_and_its_box_no_step():
    assert labels(P, "7+5=12\n12-3=9\n9+8=17\n\\boxed{17}") == [
        ("7+5=12", "sound", "12"),
        ("12-3=9", "sound", "9"),
        ("9+8=17", "sound", "17"),
    ]


def test_a_random_wrong_result_is_a_slip_and_what_follows_from_it_is_inherited():
    assert labels(P, "7+5=13\n13-3=10\n10+8=18\n\\boxed{18}") == [
        ("7+5=13", "slip", "13"),
        ("13-3=10", "inherited", "10"),
        ("10+8=18", "inherited", "18"),
    ]


def test_a_forgotten_carry_is_a_misconception():
    # 9+8: the units 9+8 = 17 carry; without the carry 17-10 = 7.
    assert labels(P, "7+5=12\n12-3=9\n9+8=7\n\\boxed{7}")[2] == ("9+8=7", "misconception", "7")


def test_a_result_ten_too_small_without_a_carry_is_a_slip():
    # 12+5 = 17 without a carry, and 17-5 = 12 is no addition.
    assert kinds("12+5-5", "12+5=7\n7-5=2") == ["slip", "inherited"]
    assert kinds("12+5-5", "12+5=17\n17-5=2") == ["sound", "slip"]


def test_an_error_on_an_inherited_total_is_an_error_of_its_own():
    # 13-3 = 10; and 15+8 carries (5+8 = 13): 23 without the carry is 13.
    assert kinds(P, "7+5=13\n13-3=11\n11+8=19") == ["slip", "slip", "inherited"]
    assert kinds(P, "7+5=18\n18-3=15\n15+8=13") == ["slip", "inherited", "misconception"]


def test_negative_totals_are_followed():
    # 2-9 = -7, -7+8 = 1
    assert kinds("2-9+8", "2-9=-7\n-7+8=1\n\\boxed{1}") == ["sound", "sound"]
    assert labels("2-9+8", "2-9=7\n7+8=15\n\\boxed{15}")[0] == ("2-9=7", "slip", "7")


def test_a_miscopied_total_or_term_is_a_slip_at_the_miscopied_part():
    assert labels(P, "7+5=12\n11-3=8\n8+8=16\n\\boxed{16}") == [
        ("7+5=12", "sound", "12"),
        ("11-3=8", "slip", "11"),
        ("8+8=16", "inherited", "16"),
    ]
    assert labels(P, "7+5=12\n12-4=8")[1] == ("12-4=8", "slip", "-4")
    assert labels(P, "7+5=12\n12+3=15")[1] == ("12+3=15", "slip", "+3")


def test_a_skipped_term_is_one_slip_and_the_chain_goes_on_behind_it():
    # The due total behind +8 is 17, so 12+8 = 20 is wrong; the box copies it.
    assert labels(P, "7+5=12\n12+8=20\n\\boxed{20}") == [("7+5=12", "sound", "12"), ("12+8=20", "slip", "+8")]


def test_a_repeated_term_is_one_slip_and_the_chain_goes_on_where_it_was():
    # 9-3 = 6 takes the 3 away twice; 6+8 = 14 is due after it.
    assert kinds(P, "7+5=12\n12-3=9\n9-3=6\n6+8=14\n\\boxed{14}") == ["sound", "sound", "slip", "inherited"]


def test_a_line_behind_the_complete_chain_is_a_slip():
    assert kinds(P, "7+5=12\n12-3=9\n9+8=17\n17+1=18\n\\boxed{18}") == ["sound"] * 3 + ["slip"]


def test_going_back_to_the_right_total_is_sound():
    assert kinds(P, "7+5=13\n12-3=9\n9+8=17\n\\boxed{17}") == ["slip", "sound", "sound"]


def test_errors_that_cancel_end_the_inheritance():
    # 13-3 = 10, but 9 is what was due: from there everything is right.
    assert kinds(P, "7+5=13\n13-3=9\n9+8=17\n\\boxed{17}") == ["slip", "slip", "sound"]


def test_a_box_that_miscopies_the_last_result_is_a_slip():
    chain = "7+5=12\n12-3=9\n9+8=17\n"
    assert labels(P, chain + "\\boxed{71}")[3:] == [("\\boxed{71}", "slip", "71")]
    assert labels(P, chain + "\\boxed{}")[3:] == [("\\boxed{}", "slip", "")]
    assert labels(P, chain + "\\boxed{ 17 }")[3:] == []


def test_a_box_in_front_of_the_end_must_hold_what_the_rest_leads_to():
    assert kinds(P, "7+5=12\n\\boxed{12}") == ["sound", "slip"]
    assert kinds(P, "7+5=12\n\\boxed{17}") == ["sound"]
    # From the wrong 13 the rest -3+8 leads to 18.
    assert kinds(P, "7+5=13\n\\boxed{18}") == ["slip"]
    assert kinds(P, "\\boxed{17}") == []


def test_a_box_with_the_right_answer_is_never_flawed():
    assert kinds(P, "7+5=13\n13-3=10\n10+8=18\n\\boxed{17}") == ["slip", "inherited", "inherited"]


def test_words_are_filler_and_empty_lines_are_nothing():
    text = "Then\n\n7+5=12\nSo far so good.\n12-3=9\n9+8=17\nso \\boxed{17}."
    assert labels(P, text) == [
        ("Then", "filler", None),
        ("7+5=12", "sound", "12"),
        ("So far so good.", "filler", None),
        ("12-3=9", "sound", "9"),
        ("9+8=17", "sound", "17"),
        ("so ", "filler", None),
        (".", "filler", None),
    ]


def test_an_equation_may_stand_among_words_and_blanks():
    assert labels(P, "First, 7 + 5 = 13.") == [("First, 7 + 5 = 13.", "slip", "13")]


@pytest.mark.parametrize(
    "line", ["7+5", "12", "7+5=", "=12", "7+5=12=12", "7++5=12", "7*5=35", "\\boxed{17", "7+5=1,2"]
)
def test_a_line_that_tries_and_is_no_equation_is_a_slip_without_a_result(line):
    assert labels(P, line) == [(line, "slip", None)]


def test_a_number_too_long_to_be_meant_is_a_slip():
    assert kinds(P, "7+5=" + "1" * 10_000) == ["slip"]
    assert kinds(P, "\\boxed{" + "1" * 10_000 + "}") == ["slip"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789+-=\n \\boxed{}٣é\r\0", max_size=80) | st.text(max_size=40))
@example("\\boxed{7+5=12\n}")
@example("\\boxed{\\boxed{1}}7+5=12")
def test_any_text_is_labelled_and_its_steps_are_ordered_ranges_of_it(text):
    steps: list[Step] = TASK.label_steps(text, prompt_of(P))
    borders = [border for step in steps for border in (step.start, step.stop)]
    assert borders == sorted(borders)
    assert all(0 <= step.start < step.stop <= len(text) for step in steps)
    assert all(s.start <= s.result[0] <= s.result[1] <= s.stop for s in steps if s.result is not None)


@pytest.mark.parametrize(
    "piece", ["7+5=12\n", "1", "-", "a", "7+", "\\boxed{1}", "\\boxed{", "{", "\n", " ", "\\boxed{}7"]
)
def test_labelling_takes_linear_time(piece):
    text = piece * (400_000 // len(piece))
    start = time.perf_counter()
    TASK.label_steps(text, prompt_of(P))
    # Linear: under a second. Quadratic: hours.
    assert time.perf_counter() - start < 20


# ---- the packaged policy


def test_the_packaged_policy_is_small():
    assert sum(file.stat().st_size for file in ASSET.iterdir()) <= 4 * 2**20


def test_any_text_survives_the_tokenizer(tokenizer):
    @settings(max_examples=200, deadline=None)
    @given(st.text())
    @example("\\boxed{17} \\boxed{-3}\r\n\t👩‍👩‍👧 ü 한국어 \x00 1234 ٣")
    @example("".join(map(chr, range(0x20, 0x250))))
    def survives(text):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text

    survives()


def test_every_byte_is_a_token(tokenizer):
    # Bytes that are no UTF-8 by themselves have tokens as well: 256 of one byte each.
    single = [t for t in tokenizer.get_vocab() if len(t) == 1]
    assert len(single) == 256


def test_digits_signs_and_braces_stand_alone(tokenizer):
    pieces = tokenizer.tokenize("Compute 12-3.12-3=-9\n\\boxed{-9}")
    assert pieces == ["ComputeĠ", *"12-3.12-3=-9", "Ċ", "\\boxed", *"{-9}"]
    assert tokenizer.chat_template is None
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<end>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_packaged_policy_is_right_on_30_to_50_percent_of_its_samples(tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(ASSET)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    problems = ProblemSpace().sample(400, "validation", seed=1)
    prompts = [str(prompt_of(p.expression).messages) for p in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=56, do_sample=True)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = [TASK.answer(text) == str(p.answer) for text, p in zip(texts, problems, strict=True)]
    # The standard error of 400 samples is 2.5 points.
    assert 0.30 <= sum(right) / len(right) <= 0.50
    found = {kind for text, p in zip(texts, problems, strict=True) for kind in kinds(p.expression, text)}
    assert {"sound", "slip", "misconception", "inherited"} <= found

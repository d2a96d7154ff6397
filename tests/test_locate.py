"""Answers and labelled steps on sampled token ids, with the packaged tokenizer."""

import re

import pytest
import torch

from grail_lightning.engines.base import build_batch
from grail_lightning.grading import align_rows, answer_masks, step_masks
from grail_lightning.tasks import ArithmeticTask, MathTask
from grail_lightning.tasks.base import Step
from tests.runs import TASK
from tests.shell import SHORT, fails

TEXTS = [
    "7+5=2\nSo \\boxed{1}\n2-3=-1\n\\boxed{-1} then",  # a forgotten carry (a misconception), and two boxes
    "7+5=13\n13-3=10\n\\boxed{10}",  # a slip, then a step that inherits it
    "7+5=12\n12-3=9",  # no box
]


def _batch(policy):
    prompt = TASK.prompt({"problem": "7+5-3"})
    ids = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return build_batch(policy, [prompt] * 3, 1, [list(i) for i in ids], [True] * 3)


def _text(policy, batch, mask, row):
    return policy.tokenizer.decode(batch.response_ids[row][mask[row]])


def test_the_last_box_is_marked_unless_the_first_is_asked_for(arithmetic):
    batch = _batch(arithmetic)
    rows = align_rows(batch, arithmetic.tokenizer)
    last, first = answer_masks(batch, rows), answer_masks(batch, rows, "first")
    assert _text(arithmetic, batch, last.whole, 0).strip() == "\\boxed{-1}"
    assert _text(arithmetic, batch, first.whole, 0).strip() == "\\boxed{1}"
    assert _text(arithmetic, batch, last.content, 0) == "-1"
    assert _text(arithmetic, batch, last.after, 0) == " then"
    assert _text(arithmetic, batch, last.content & ~last.marker, 1) == "10"


def test_a_row_without_a_box_has_empty_masks(arithmetic):
    batch = _batch(arithmetic)
    masks = answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
    for mask in (masks.whole, masks.content, masks.marker, masks.after):
        assert not mask[2].any()
        assert not (mask & ~batch.response_mask).any()


def test_steps_are_marked_where_their_error_shows(arithmetic):
    batch = _batch(arithmetic)
    steps = step_masks(batch, arithmetic.tokenizer)
    assert _text(arithmetic, batch, steps["misconception"], 0) == "2"
    assert _text(arithmetic, batch, steps["slip"], 1) == "13"
    assert _text(arithmetic, batch, steps["inherited"], 1) == "10"
    assert _text(arithmetic, batch, steps["sound"], 2) == "129"
    together = torch.stack(list(steps.values())).sum(0)
    assert together.max() == 1, "a token is of one kind"


def test_a_task_that_cannot_label_gives_no_masks(arithmetic):
    batch = _batch(arithmetic)
    prompt = MathTask().prompt({"problem": "1+1?", "answer": "2"})
    assert step_masks(batch.replace(prompts=[prompt] * 3), arithmetic.tokenizer) is None


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("sound", r"a list of `Step`, or None where the task cannot label, but got 'sound'"),
        ([{"start": 0, "stop": 3}], r"a list of `Step`, or None .*, but got \[\{'start': 0"),
        (
            [Step(start=0, stop=3, kind="wrong")],
            r"`kind` is one of sound, slip, .*filler, but got Step\(start=0, stop=3, kind='wrong'",
        ),
        (
            [Step(start=0, stop=99, kind="slip")],
            r"within the text, 0 ≤ start ≤ stop ≤ 13, but got Step\(start=0, stop=99",
        ),
        ([Step(start=5, stop=3, kind="slip")], r"within the text, .*, but got Step\(start=5, stop=3"),
        ([Step(start=-2, stop=3, kind="slip")], r"within the text, .*, but got Step\(start=-2"),
        ([Step(start=0, stop=3, kind="slip", result=(2, 99))], r"within the text, .*, but got .*result=\(2, 99\)"),
        ([Step(start=0, stop=3, kind="slip", result=2)], r"within the text, .*, but got .*result=2\)"),
        ([Step(start="7", stop=3, kind="slip")], r"within the text, .*, but got Step\(start='7'"),
        ([Step(start=0, stop=2.5, kind="slip")], r"within the text, .*, but got Step\(start=0, stop=2.5"),
        (
            [Step(start=4, stop=9, kind="slip"), Step(start=0, stop=5, kind="sound")],
            r"do not overlap, but got Step\(start=0, stop=5, .*\) and Step\(start=4, stop=9, .*\)",
        ),
    ],
)
def test_labels_that_are_no_steps_within_the_text_name_the_task(steps, message, arithmetic):
    class Mine(ArithmeticTask):
        def label_steps(self, text, prompt):
            return steps if text == TEXTS[2] else super().label_steps(text, prompt)

    batch = _batch(arithmetic)
    prompt = Mine().prompt({"problem": "7+5-3"})
    message = rf"`Mine\.label_steps` must return .*{message}.* for the prompt 'Compute 7\+5-3\.'"
    with pytest.raises(ValueError, match=message):
        step_masks(batch.replace(prompts=[prompt] * 3), arithmetic.tokenizer)


def test_labels_that_cannot_be_made_are_one_line_of_the_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mislabelled.py").write_text(
        "from grail_lightning.tasks import ArithmeticTask\nfrom grail_lightning.tasks.base import Step\n"
        "class Mine(ArithmeticTask):\n    def label_steps(self, text, prompt):\n        return [Step(0, 5, 'sound')]\n"
    )
    said = fails(capsys, "fit", *SHORT, "--data.task=mislabelled.Mine")
    assert re.search(r"`Mine\.label_steps` raised TypeError: Step.* positional .* for the prompt 'Compute \d", said)
    assert "`Step(start=0, stop=5, kind='sound')`" in said

"""Folders in the form of ChartQA, and its relaxed accuracy."""

import json

import pytest

from grail_lightning import DatasetSpec, MathData, MathTask
from grail_lightning.answers.records import Verdict
from grail_lightning.core.records.picture import pictures_in
from tests.picture_models import image

ROWS = [("a.png", "How many bars?", "4"), ("b.png", "Which one is largest?", "Peru")]


def _folder(folder, split="train", rows=ROWS, name="train_human.json"):
    (folder / split / "png").mkdir(parents=True, exist_ok=True)
    for seed, (picture, *_) in enumerate(rows):
        image(seed).save(folder / split / "png" / picture)
    named = [dict(zip(("imgname", "query", "label"), row, strict=True)) for row in rows]
    (folder / split / name).write_text(json.dumps(named))
    return folder


def test_a_folder_of_chartqa_is_read_with_its_pictures(tmp_path):
    _folder(tmp_path, name="train_augmented.json", rows=[("c.png", "What is the sum?", "12.5")])
    _folder(_folder(tmp_path), "val")
    val = DatasetSpec(str(tmp_path), split="val", limit=1)
    data = MathData(train=str(tmp_path), val=val, task=MathTask(instruction="", compare="relaxed"))
    (part,) = data.load("train")
    assert [(p.messages[0]["content"][1]["text"], p.reference) for p in part.prompts] == [
        ("What is the sum?", "12.5"),
        *((query, label) for _, query, label in ROWS),
    ]
    (shown,) = pictures_in(part.prompts[2].messages)
    assert shown.open().tobytes() == image(1).tobytes()
    assert len(data.load("val")[0].prompts) == 1
    with pytest.raises(ValueError, match=r"a folder for `split` 'test' with `png` in it, but has: train, val\."):
        MathData(test=DatasetSpec(str(tmp_path), split="test"))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"imgname": "no.png", "query": "?", "label": "1"}, "the picture"),
        ({"query": "?", "label": "1"}, "the picture"),
        ({"imgname": "../../x", "query": "?", "label": "1"}, ".*there is no"),
        ({"imgname": "a.png", "label": "1"}, "there is no column `query`"),
        ({"imgname": "a.png", "query": "?", "label": ""}, "`label` must be text"),
        ("a.png", "expected an object with named columns"),
    ],
)
def test_a_bad_row_is_named_with_its_file(row, words, tmp_path):
    (_folder(tmp_path) / "train" / "train_human.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=rf"^[^\n]*train_human.json, row 1: {words}[^\n]*$"):
        [*MathData(train=str(tmp_path)).load("train")[0].prompts]


def test_relaxed_accuracy_is_that_of_chartqa():
    right = [("100", "105"), ("-20", "-19"), ("0.5", "50%"), ("12%", "12.5%"), ("Yes", "yes ")]
    wrong = [("100", "105.1"), ("-20", "20"), ("12%", "12"), ("0", "0.01"), ("nan", "3"), ("inf", "5")]
    for gold, prediction in [*right, *wrong]:
        verdict = Verdict.of_text(gold, prediction, ignore_case=True, relaxed=True)
        assert verdict.correct == ((gold, prediction) in right), (gold, prediction)

"""Datasets that a Python program gives as rows."""

import datasets
import pandas
import pytest

from grail_lightning.data import DatasetSpec, FewShot, MathData

ROWS = [{"problem": f"{k}+1", "answer": k + 1, "level": k, "solution": f"\\boxed{{{k + 1}}}"} for k in range(6)]
FORMS = {"list": ROWS, "Dataset": datasets.Dataset.from_list(ROWS)}


def prompts(split="train", **options):
    data = MathData(**options)
    return [prompt for part in data.load(split) for prompt in part.prompts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
def test_rows_become_prompts_as_those_of_a_file_do(form, split, tmp_path):
    file = tmp_path / "rows.jsonl"
    pandas.DataFrame(ROWS).to_json(file, orient="records", lines=True)
    of_file, of_rows = (prompts(split, **{split: given}) for given in (str(file), FORMS[form]))
    assert [p.messages for p in of_rows] == [p.messages for p in of_file]
    assert [p.reference for p in of_rows] == ["1", "2", "3", "4", "5", "6"]
    assert {p.dataset for p in of_rows} == {"rows"}


@pytest.mark.parametrize("form", FORMS)
def test_options_of_columns_hold_for_rows(form):
    rows = FORMS[form]
    spec = DatasetSpec(rows, problem="solution", answer="level", where={"level": {"min": 2}}, limit=3, name="few")
    found = prompts(train=spec)
    assert [p.reference for p in found] == ["2", "3", "4"]
    assert {p.dataset for p in found} == {"few"}
    several = MathData(val=[DatasetSpec(rows, name="one"), DatasetSpec(ROWS[:1], name="two")]).load("val")
    assert [(part.name, len(part.prompts)) for part in several] == [("one", 6), ("two", 1)]


def test_the_examples_of_one_list_leave_the_rows_of_another_one_alone():
    other = [row | {"problem": row["problem"] + "+0"} for row in ROWS]
    shots = FewShot(number=2, dataset=DatasetSpec(other))
    assert len(prompts(train=ROWS, few_shot=shots)) == 6, "the lists have as many rows, and are not the same"
    assert len(prompts(train=ROWS, few_shot=FewShot(number=2))) == 4


def test_given_rows_are_left_unchanged():
    rows = [dict(row) for row in ROWS]
    prompts(train=rows)
    assert rows == ROWS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"problem": "1+1"}], "1 rows given in Python, row 1: there is no column `answer`"),
        ([{"problem": "1+1", "answer": ""}], "row 1: `answer` must not be empty"),
        ([ROWS[0], "2+2"], r"row 2: expected an object with named columns, but got '2\+2'"),
        ([{"problem": "\ud83d", "answer": "1"}], "row 1: `problem` must be valid Unicode"),
        (pandas.DataFrame(ROWS), r"list of dicts or a `datasets.Dataset`, but got DataFrame. Give `df.to_dict"),
        (datasets.DatasetDict(train=FORMS["Dataset"]), "but got DatasetDict. .*one split"),
        (DatasetSpec([]), "must hold at least one row"),
        ([ROWS, ROWS], "must have different names, but got rows"),
        ("6 rows given in Python", "`path` must be a file or a name, but got '6 rows given in Python'"),
    ],
)
def test_a_mistake_names_the_row_and_the_next_step(given, said):
    with pytest.raises(ValueError, match=said):
        prompts(train=given)

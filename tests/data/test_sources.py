import json
from collections import Counter

import pytest

from grail_lightning.answers import Verifier
from grail_lightning.data import DatasetSpec, MathData
from grail_lightning.data.sources import check_path, read_table
from tests.data.recorder import rows, write


def _load(spec, split="val", **options):
    """The prompts of one dataset, through the data module."""
    data = MathData(**{split: spec}, **options)
    data.setup("validate")
    return [prompt for loader in data.val_dataloader() for batch in loader for prompt in batch]


def _parquet(path, table):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(table), path)
    return str(path)


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    """`datasets` keeps Arrow files of what it reads; not in the user's home."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_format_gives_the_same_prompts(tmp_path, kind):
    table = [
        {"question": "What is $1+1$?", "final_answer": "2", "level": 3},
        {"question": "é?", "final_answer": "π", "level": 4},
    ]
    if kind == "jsonl":
        path = write(tmp_path, table)
    elif kind == "json":
        path = write(tmp_path, [json.dumps(table, indent=1)], "train.json")
    elif kind == "parquet":
        path = _parquet(tmp_path / "train.parquet", table)
    else:
        (tmp_path / "folder").mkdir()
        _parquet(tmp_path / "folder" / "test.parquet", table)
        path = str(tmp_path / "folder")
    prompts = _load(DatasetSpec(path, problem="question", answer="final_answer", split="test", name="x"))
    assert [prompt.reference for prompt in prompts] == ["2", "π"]
    assert prompts[0].messages[-1]["content"].startswith("What is $1+1$? Please reason step by step")
    assert prompts[1].columns["level"] == 4
    assert prompts[1].dataset == "x"


def test_a_path_alone_is_a_dataset_and_numbers_are_answers(tmp_path):
    path = write(tmp_path, [{"problem": "1+1?", "answer": 2}, {"problem": "1/2?", "answer": 0.5}])
    assert [prompt.reference for prompt in _load(path)] == ["2", "0.5"]


def test_filters_take_values_lists_and_ranges(tmp_path):
    path = write(tmp_path, [row | {"subject": "ab"[row["level"] % 2]} for row in rows(10)])

    def levels(**options):
        return [prompt.columns["level"] for prompt in _load(DatasetSpec(path, **options))]

    assert levels(where={"subject": "a"}) == [0, 2, 4, 6, 8]
    assert levels(where={"level": [1, 7, 99]}) == [1, 7]
    assert levels(where={"level": {"min": 3, "max": 5}}) == [3, 4, 5]
    assert levels(where={"level": {"min": 3}, "subject": ["a"]}) == [4, 6, 8]
    assert levels(where={"level": {"min": 3}}, limit=2) == [3, 4]  # the first rows of those that fit
    assert levels(limit=99) == list(range(10))


def test_rows_that_a_filter_leaves_out_need_not_be_complete(tmp_path):
    path = write(tmp_path, [{"problem": "", "answer": "", "ok": False}, {"problem": "1+1?", "answer": "2", "ok": True}])
    assert len(_load(DatasetSpec(path, where={"ok": True}))) == 1


BAD_ROWS = {
    "no column": (
        {"problem": "p", "anwser": "2"},
        r"line 3: there is no column `answer`. The columns are: problem, anwser",
    ),
    "empty answer": ({"problem": "p", "answer": " "}, r"line 3: `answer` must not be empty"),
    "null problem": ({"problem": None, "answer": "2"}, r"line 3: `problem` must not be empty"),
    "list": ({"problem": ["p"], "answer": "2"}, r"line 3: `problem` must be text or a number, but got \['p'\]"),
    "not a number": ('{"problem": "p", "answer": NaN}', r"line 3: `answer` must be a finite number, but got nan"),
    "infinite": ('{"problem": "p", "answer": -Infinity}', r"line 3: `answer` must be a finite number, but got -inf"),
    "overflow": ('{"problem": "p", "answer": 1e999}', r"line 3: `answer` must be a finite number, but got inf"),
    "overflowing problem": (
        '{"problem": 1e999, "answer": 1}',
        r"line 3: `problem` must be a finite number, but got inf",
    ),
    "digits": (f'{{"problem": "p", "answer": {"9" * 5000}}}', r"line 3: Exceeds the limit .* Write the number as text"),
    "no object": (["p", "2"], r"line 3: expected an object with named columns, but got \['p', '2'\]"),
    "malformed": ('{"problem": "p", "answer": \n', r"line 3: malformed JSON \(Expecting value"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, case):
    row, message = BAD_ROWS[case]
    path = write(tmp_path, [{"problem": "p", "answer": "1"}, "\n", row])  # the empty line counts
    with pytest.raises(ValueError, match=rf"train.jsonl, {message}"):
        _load(path)


def test_a_malformed_array_is_named_by_its_line(tmp_path):
    path = write(tmp_path, ['[\n{"problem": "p", "answer": "1"},\n{"problem": "p" "answer": "1"}]'], "train.json")
    with pytest.raises(ValueError, match=r"train.json, line 3: malformed JSON"):
        _load(path)


@pytest.mark.usefixtures("_own_cache")
def test_a_missing_number_of_a_parquet_file_is_named_by_its_row(tmp_path):
    path = _parquet(tmp_path / "a.parquet", [{"problem": "p", "answer": 2.5}, {"problem": "p", "answer": float("nan")}])
    with pytest.raises(ValueError, match=r"a.parquet, row 2: `answer` must be a finite number, but got nan"):
        _load(path)


@pytest.mark.usefixtures("_own_cache")
def test_a_parquet_file_without_the_column_is_named_with_those_that_it_has(tmp_path):
    path = _parquet(tmp_path / "a.parquet", [{"question": "p", "final_answer": "2"}])
    with pytest.raises(ValueError, match=r"a.parquet, row 1: there is no column `problem`.*: question, final_answer\."):
        _load(path)


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = write(tmp_path, [content])
    with pytest.raises(ValueError, match=r"train.jsonl must hold at least one row, but it is empty"):
        _load(path)


def test_text_that_is_not_utf8_is_an_error_with_the_file(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "é", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jsonl must be UTF-8 text, but byte 13 is not"):
        _load(str(tmp_path / "latin.jsonl"))


def test_a_filter_that_nothing_fits_shows_what_there_is(tmp_path):
    path = write(tmp_path, rows(2))
    with pytest.raises(ValueError, match=r"No row of .* fits `where` \{'level': \[7\]\}.*\{'level': \['0', '1'\]\}"):
        _load(DatasetSpec(path, where={"level": [7]}))
    with pytest.raises(ValueError, match=r"line 1: there is no column `grade`"):
        _load(DatasetSpec(path, where={"grade": 7}))
    with pytest.raises(ValueError, match=r"`problem` must be comparable with \{'min': 1\}, but got '0\+1\?'"):
        _load(DatasetSpec(path, where={"problem": {"min": 1}}))


@pytest.mark.parametrize("path", ["nope.jsonl", "./folder", "a/b/c", "data/nope.parquet", "~/nope"])
def test_a_missing_file_is_found_when_the_data_module_is_made(path):
    with pytest.raises(ValueError, match=r"`path` '.*' does not exist \(looked in "):
        MathData(train=path)


def test_a_name_that_may_be_on_the_hub_is_not_looked_for_before_it_is_needed():
    data = MathData(train=DatasetSpec("nobody-at-all/no-such-set", split="train"))
    with pytest.raises(ValueError, match=r"Cannot load the dataset 'nobody-at-all/no-such-set': .* Check its name"):
        data.prepare_data()


def test_specs_refuse_what_makes_no_sense(tmp_path):
    path = write(tmp_path, rows(1))
    with pytest.raises(ValueError, match="`weight` of a must be a positive number, but got 0"):
        DatasetSpec("a", weight=0)
    with pytest.raises(ValueError, match="`limit` of a must be at least 1 row, but got 0"):
        DatasetSpec("a", limit=0)
    with pytest.raises(ValueError, match="`where` of a must give for `level` a value, a list of"):
        DatasetSpec("a", where={"level": {"minimum": 3}})
    with pytest.raises(ValueError, match="datasets of `val` must have different names, but got train more than once"):
        MathData(val=[path, path])
    with pytest.raises(
        ValueError, match=r"'math/500' and 'math_500' must differ in more .* `math_500` for both\. Set `name`"
    ):
        MathData(test=[DatasetSpec(path, name="math/500"), DatasetSpec(path, name="math_500")])
    with pytest.raises(ValueError, match=r"must be a file of type .jsonl, .json, .parquet, but got"):
        MathData(val=write(tmp_path, ["a"], "train.csv"))
    with pytest.raises(ValueError, match="`overlong` must be drop or error, but got 'cut'"):
        MathData(train=path, overlong="cut")
    with pytest.raises(ValueError, match="`max_prompt_length` must be at least 1 token, but got 0"):
        MathData(train=path, max_prompt_length=0)


@pytest.mark.parametrize(("stage", "split"), [("fit", "train"), ("validate", "val"), ("test", "test")])
def test_a_stage_without_data_says_which_option_is_missing(stage, split):
    with pytest.raises(ValueError, match=f"`{stage}` needs `data.{split}`, but no dataset was given"):
        MathData().setup(stage)


def test_evaluation_datasets_stay_apart_under_their_names(tmp_path):
    one, two = write(tmp_path, rows(3), "one.jsonl"), write(tmp_path, rows(5), "two.jsonl")
    data = MathData(test=[one, DatasetSpec(two, name="second")], eval_prompts_per_batch=4)
    data.setup("test")
    names = [[prompt.dataset for batch in loader for prompt in batch] for loader in data.test_dataloader()]
    assert names == [["one"] * 3, ["second"] * 5]


def test_training_data_of_two_files_are_mixed_by_weight(tmp_path):
    one, two = write(tmp_path, rows(30), "one.jsonl"), write(tmp_path, rows(10), "two.jsonl")
    data = MathData(train=[DatasetSpec(one), DatasetSpec(two, weight=4.0)], prompts_per_batch=8)
    data.setup("fit")
    drawn = Counter(prompt.dataset for batch in data.train_dataloader() for prompt in batch)
    assert drawn == {"one": 8, "two": 32}  # 40 draws, 1 : 4


@pytest.mark.parametrize("column", ["problem", "answer", "source"])
def test_half_of_a_surrogate_pair_is_found_with_file_and_line(column, tmp_path):
    """JSON can write it; the tokenizer of a run would stop at it, hours later perhaps."""
    rows = [{"problem": "1+1?", "answer": "2", "source": "\U0001f600"}] * 2
    bad = rows[0] | {column: "a\ud83d"}
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows, bad]))
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 3: `{column}` must be valid Unicode, but holds half"):
        read_table(DatasetSpec(str(file)))
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_table(DatasetSpec(str(file))).rows[1]["source"] == "\U0001f600"
    array = tmp_path / "t.json"
    array.write_text(json.dumps([*rows, bad]))
    with pytest.raises(ValueError, match=rf"t\.json, row 3: `{column}` must be valid Unicode"):
        read_table(DatasetSpec(str(array)))


def test_a_file_name_with_a_mistyped_ending_is_not_looked_for_on_the_hub():
    with pytest.raises(ValueError, match=r"'train\.jsnl' does not exist"):
        check_path(DatasetSpec("train.jsnl"))
    check_path(DatasetSpec("gsm8k"))
    check_path(DatasetSpec("owner/name-v1.5"))


def test_answers_are_what_each_benchmark_keeps(tmp_path):
    """A number, the last box of a solution, a list of answers, and a list with one text of several answers."""
    table = [
        {"problem": "a", "answer": 27.0},
        {"problem": "b", "answer": r"First \boxed{1}, then \boxed{\frac{1}{2}} cm."},
        {"problem": "c", "answer": ["3", "5"]},
        {"problem": "d", "answer": ["$69$,$84$"]},
    ]
    prompts = _load(write(tmp_path, table))
    assert [prompt.reference for prompt in prompts] == ["27.0", r"\frac{1}{2}", "3, 5", "$69$,$84$"]
    given = ["27", r"0.5", "5,3", "84, 69"]
    with Verifier() as verifier:
        verdicts = verifier.grade([(p.reference, answer) for p, answer in zip(prompts, given, strict=True)])
    assert all(verdict.correct for verdict in verdicts), verdicts


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "`answer` must not be empty"),
        (["1", ""], "`answer` must not be empty"),
        ([["1"]], "must be text or a number"),
    ],
)
def test_a_list_without_answers_is_an_error_with_its_line(answer, message, tmp_path):
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        _load(write(tmp_path, [{"problem": "a", "answer": answer}]))


HUB = [
    DatasetSpec(
        "owner/one", problem="question", answer="final_answer", split="test", subset="en", name="first", limit=2
    ),
    DatasetSpec("owner/second", split="test"),
]


def test_a_folder_of_copies_takes_the_place_of_the_hub(tmp_path):
    write(tmp_path, [{"question": f"{k}?", "final_answer": [str(k)]} for k in range(3)], "first.jsonl")
    _parquet(tmp_path / "second.parquet", [{"problem": "1+1?", "answer": "2"}])
    data = MathData(test=HUB, folder=str(tmp_path))
    data.prepare_data()
    data.setup("test")
    prompts = [prompt for loader in data.test_dataloader() for batch in loader for prompt in batch]
    assert [(prompt.dataset, prompt.reference) for prompt in prompts] == [
        ("first", "0"),
        ("first", "1"),
        ("second", "2"),
    ]


def test_a_copy_may_have_the_usual_columns(tmp_path):
    for name in ("first", "second"):
        write(tmp_path, [{"problem": "1+1?", "answer": "2"}], f"{name}.jsonl")
    data = MathData(test=HUB, folder=str(tmp_path))
    data.setup("test")
    assert [loader.prompts[0].reference for loader in data.test_dataloader()] == ["2", "2"]


def test_a_folder_without_a_copy_says_which_file_is_asked_for(tmp_path):
    write(tmp_path, [{"problem": "1+1?", "answer": "2"}], "first.jsonl")
    for folder, holds in ((tmp_path, "it holds first.jsonl"), (tmp_path / "nowhere", "it is no folder")):
        wanted = "second" if folder == tmp_path else "first"
        with pytest.raises(ValueError, match=rf"must hold {wanted}\.jsonl \(or \.json, \.parquet\), but {holds}"):
            MathData(test=HUB, folder=str(folder))

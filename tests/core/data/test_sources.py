"""Rows of files, folders, the hub and Python programs: formats, filters, copies, and messages that name the row."""

import json
import math
from collections import Counter
from dataclasses import replace

import datasets
import pandas
import pytest

from grail_lightning import (
    ArithmeticData,
    ArithmeticTask,
    DatasetSpec,
    EnvironmentTask,
    FewShot,
    MathData,
    MathTask,
    grade_answers,
)
from grail_lightning.answers import Boxed, Marker
from grail_lightning.core.data.sources import check_path
from grail_lightning.core.rollout.grading import TaskVerifiers
from tests.core.data.recorder import rows, write
from tests.core.environments.test_tools import Desk

ROWS = [{"problem": f"{k}+1", "answer": k + 1, "level": k, "solution": f"\\boxed{{{k + 1}}}"} for k in range(6)]
FORMS = {"list": ROWS, "Dataset": datasets.Dataset.from_list(ROWS)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """`datasets` keeps Arrow files of what it reads; not in the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(split="val", **options):
    """The prompts of a split."""
    return [prompt for part in MathData(**options).load(split) for prompt in part.prompts]


def parquet(path, table):
    pandas.DataFrame(table).to_parquet(path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_format_gives_the_same_prompts(tmp_path, kind):
    table = [
        {"question": "What is $1+1$?", "final_answer": "2", "level": 3},
        {"question": "é?", "final_answer": "π", "level": 4},
    ]
    path = tmp_path / ("folder" if kind == "folder" else f"train.{kind}")
    if kind == "folder":
        path.mkdir()
        parquet(path / "test.parquet", table)
    elif kind == "parquet":
        parquet(path, table)
    else:
        write(tmp_path, table if kind == "jsonl" else [json.dumps(table, indent=1)], path.name)
    prompts = load(val=DatasetSpec(path, "question", "final_answer", split="test", name="x"))
    assert [prompt.reference for prompt in prompts] == ["2", "π"]
    assert prompts[0].messages[-1]["content"].startswith("What is $1+1$? Please reason step by step")
    assert (prompts[1].columns["level"], prompts[1].dataset) == (4, "x")


def test_filters_take_values_lists_and_ranges(tmp_path):
    table = [row | {"subject": "ab"[row["level"] % 2]} for row in rows(10)]
    path = write(tmp_path, [*table, {"problem": "", "answer": "", "level": 99, "subject": "unfinished"}])

    def levels(**options):
        return [prompt.columns["level"] for prompt in load(val=DatasetSpec(path, **options))]

    assert levels(where={"subject": "a"}) == [0, 2, 4, 6, 8]
    assert levels(where={"level": [1, 7, 98]}) == [1, 7]
    assert levels(where={"level": {"min": 3, "max": 5}, "subject": ["a", "b"]}) == [3, 4, 5]
    assert levels(where={"level": {"min": 3}}, limit=2) == [3, 4]  # the first rows of those that fit
    complete = {"level": {"max": 9}}
    held_out, rest = levels(where=complete, limit=2), levels(where=complete, skip=2)
    assert (held_out, rest) == ([0, 1], [2, 3, 4, 5, 6, 7, 8, 9])
    assert levels(where={"level": {"min": 3}}, skip=1, limit=1) == [4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "p", "anwser": "2"}, "there is no column `answer`. The columns are: problem, anwser"),
        ({"problem": "p", "answer": " "}, "`answer` must be text that is not empty"),
        ({"problem": None, "answer": "2"}, "`problem` must be text that is not empty"),
        ({"problem": ["p"], "answer": "2"}, r"`problem` must be text or a number, but got \['p'\]. .*optional_columns"),
        ({"problem": "p", "answer": ["1", ""]}, "`answer` must be text that is not empty"),
        ({"problem": "p", "answer": [["1"]]}, "`answer` must be text or a number"),
        ('{"problem": "p", "answer": NaN}', "`answer` must be .* a finite number, but got nan"),
        ('{"problem": 1e999, "answer": 1}', "`problem` must be .* a finite number, but got inf"),
        (
            f'{{"problem": "p", "answer": {"9" * 5000}}}',
            "a whole number must have at most 4,300 digits, .*as text",
        ),
        ('{"problem": ' + "[" * 200_000, "malformed JSON"),
        (["p", "2"], r"expected an object with named columns, but got \['p', '2'\]"),
        ('{"problem": "p", "answer": \n', r"malformed JSON .Expecting value at column 28.\. It"),
        # JSON can write half of a surrogate pair; the tokenizer of a run would stop at it, hours later perhaps.
        ({"problem": "p", "answer": "1", "source": "a\ud83d"}, "`source` must be valid Unicode, but holds"),
    ],
    ids=range(13),
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message):
    path = write(tmp_path, [{"problem": "p", "answer": "1"}, "\n", row])  # the empty line counts
    with pytest.raises(ValueError, match=rf"train.jsonl, line 3:? {message}"):
        load(val=path)


LATIN = '{"problem": "é", "answer": "1"}'.encode("latin-1")


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b'[\n{"problem": "p", "answer": "1"},\n{"problem": "p" "answer": 1}]', "a.json", "a.json, line 3: malformed"),
        (b"", "a.jsonl", "a.jsonl must hold at least one row, but it is empty"),
        ({"problem": [], "answer": []}, "a.parquet", "must hold at least one row, but it is empty"),
        (LATIN, "a.jsonl", r"a.jsonl, line 1: malformed JSON .*can.t decode byte 0xe9.*must be UTF-8"),
        ({"problem": ["p", "q"], "answer": [2.5, math.inf]}, "a.parquet", "row 2: `answer`"),
        ({"question": ["p"]}, "a.parquet", r"row 1: there is no column `problem`. The columns are: question\."),
        (b"PAR1", "a.parquet", r"Cannot load the dataset '.*a\.parquet': Arrow"),
        (b"a", "a.csv", r"must be a file of type .jsonl, .json, .parquet or a folder, but got .*a\.csv"),
    ],
    ids=range(8),
)
def test_a_bad_file_is_named(content, name, message, tmp_path):
    path = tmp_path / name
    if isinstance(content, dict):
        parquet(path, content)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(val=str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: DatasetSpec(path, limit=0), r"`limit` must lie in \[1, inf\), but got 0"),
        (lambda path: DatasetSpec(path, skip=-1), r"`skip` must lie in \[0, inf\), but got -1"),
        (lambda path: load(val=DatasetSpec(path, skip=2)), r"`skip` must leave a row of .*, but got 2 of 2\."),
        (lambda path: DatasetSpec("a", weight=math.nan), r"`weight of a` must lie in \(0, inf\), but got nan"),
        (lambda path: DatasetSpec("a", where={"level": {"minimum": 3}}), "`where` of .* must give for `level` a value"),
        (lambda path: load(val=DatasetSpec(path, where={"level": [7]})), r"fits `where` .*\{'level': \['0', '1'\]\}"),
        (lambda path: load(val=DatasetSpec(path, where={"grade": 7})), "line 1: there is no column `grade`"),
        (lambda path: load(val=DatasetSpec(path, where={"problem": {"min": 1}})), "`problem` must be comparable with"),
        (lambda path: MathData(val=[path, path]), "must have different names, but got 'train' after one"),
        (
            lambda path: MathData(test=[DatasetSpec(path, name=name) for name in ("math/500", "math_500")]),
            "but got 'math_500' after one that is `math_500` in .* Set `name`",
        ),
        *(
            (lambda _, path=path: MathData(train=path), r"`path` '.*' does not exist \(looked in ")
            for path in ("nope.jsonl", "train.jsnl", "./folder", "a/b/c", "data/nope.parquet", "~/nope")
        ),
        (lambda path: MathData().setup("fit"), "`fit` needs `data.train`, but no dataset was given"),
        (lambda path: MathData(train=path).setup("test"), "`test` needs `data.test`, but no dataset was given"),
        # A name that may be on the hub is not looked for before it is needed.
        (lambda path: MathData(train="nobody/no-such-set").prepare_data(), "Cannot load .* 'nobody/no-such-set': "),
    ],
    ids=range(19),
)
def test_options_that_make_no_sense_are_refused(make, message, tmp_path):
    path = write(tmp_path, rows(2))
    for name in ("gsm8k", "owner/name-v1.5"):
        check_path(DatasetSpec(name))
    with pytest.raises(ValueError, match=message):
        make(path)


def test_evaluation_datasets_stay_apart_and_training_data_are_mixed_by_weight(tmp_path):
    one, two = write(tmp_path, rows(30), "one.jsonl"), write(tmp_path, rows(10), "two.jsonl")
    data = MathData(
        train=[one, DatasetSpec(two, weight=4.0)], test=[one, DatasetSpec(two, name="second")], prompts_per_batch=8
    )
    data.setup("test")
    names = [{prompt.dataset for batch in loader for prompt in batch} for loader in data.test_dataloader()]
    assert names == [{"one"}, {"second"}]
    data.setup("fit")
    drawn = Counter(prompt.dataset for batch in data.train_dataloader() for prompt in batch)
    assert drawn == {"one": 8, "two": 32}  # 40 draws, 1 : 4


def test_answers_are_what_each_benchmark_keeps(tmp_path):
    """A number, the last box of a solution, a list of answers, and a list with one text of several answers."""
    kept = [
        (27.0, "27.0", "27"),
        (r"First \boxed{1}, then \boxed{\frac{1}{2}} cm.", r"\frac{1}{2}", "0.5"),
        (["3", "5"], "3, 5", "5,3"),
        (["$69$,$84$"], "$69$,$84$", "84, 69"),
        ([r"So \boxed{1}", r"or \boxed{2}."], "1, 2", "2, 1"),
    ]
    prompts = load(val=write(tmp_path, [{"problem": "p", "answer": answer} for answer, _, _ in kept]))
    assert [prompt.reference for prompt in prompts] == [reference for _, reference, _ in kept]
    verdicts = grade_answers([f"\\boxed{{{given}}}" for _, _, given in kept], prompts, TaskVerifiers())
    assert all(verdict.correct for verdict in verdicts), verdicts
    # Of a list of texts each is right.
    table = [{"problem": "Which town?", "answer": ["Paris", "City of Paris"]}]
    (prompt,) = load(task=MathTask(compare="text", answer=Marker("Answer:")), val=table)
    texts = ["Answer: paris", "Answer: City of  Paris", "Answer: Paris, City of Paris", "Answer: Rome"]
    verdicts = grade_answers(texts, [prompt] * 4, TaskVerifiers())
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False]


# ---- copies of datasets of the hub

HUB = [
    DatasetSpec("owner/one", "question", "final_answer", split="test", subset="en", name="first", limit=2),
    DatasetSpec("owner/second", split="test"),
]


def test_a_folder_of_copies_takes_the_place_of_the_hub(tmp_path):
    copies, own = tmp_path / "copies", write(tmp_path, [{"q": "1+1?", "final": "2"}], "easy.jsonl")
    copies.mkdir()
    write(copies, [{"question": f"{k}?", "final_answer": [str(k)]} for k in range(3)], "first.jsonl")
    parquet(copies / "second.parquet", [{"problem": "1+1?", "answer": "7"}])
    write(copies, rows(5), "easy.jsonl")  # Not read: a dataset that is here is read from its own path.
    data = MathData(test=[*HUB, DatasetSpec(own, problem="q", answer="final")], folder=str(copies))
    data.prepare_data()
    prompts = [(prompt.dataset, prompt.reference) for part in data.load("test") for prompt in part.prompts]
    assert prompts == [("first", "0"), ("first", "1"), ("second", "7"), ("easy", "2")]
    write(copies, [{"problem": "1+1?", "answer": "2"}], "first.jsonl")  # With the usual columns.
    assert load("test", test=HUB, folder=str(copies))[0].reference == "2"
    for path, problem, message in (
        ("nowhere/easy.jsonl", "problem", r"'nowhere/easy\.jsonl' does not exist"),
        (own, "question", "line 1: there is no column `question`"),  # Columns of a file that is here are not guessed.
        ("owner/third", "problem", r"must hold third\.jsonl \(or \.json, \.parquet\), but does not"),
    ):
        with pytest.raises(ValueError, match=message):
            load("test", test=DatasetSpec(path, problem=problem), folder=str(copies))


def test_a_file_has_no_splits_that_could_be_other_rows(tmp_path):
    path = write(tmp_path, ROWS, "rows.jsonl")
    write(tmp_path, ROWS, "gsm8k.jsonl")  # A copy of a dataset of the hub.
    MathData(train=DatasetSpec(path, where={"k": 0}), val=DatasetSpec(path, split="test", where={"k": 1}))
    for train, val in (
        (DatasetSpec(path), DatasetSpec(path, split="test")),
        (DatasetSpec(path), DatasetSpec(f"{tmp_path}/./rows.jsonl", subset="a")),
        (DatasetSpec("openai/gsm8k"), DatasetSpec("openai/gsm8k", split="test")),
    ):
        with pytest.raises(ValueError, match="is one table here, but is given with several `split` or `subset`"):
            MathData(train=train, val=val, folder=str(tmp_path))
    write(tmp_path, ROWS, "gsm8k_test.jsonl")
    MathData(
        train=DatasetSpec("openai/gsm8k"),
        test=DatasetSpec("openai/gsm8k", split="test", name="gsm8k_test"),  # Another file.
        folder=str(tmp_path),
    )


# ---- rows of a Python program


@pytest.mark.parametrize("form", FORMS)
def test_rows_become_prompts_as_those_of_a_file_do_and_stay_unchanged(form, tmp_path):
    file = write(tmp_path, ROWS, "rows.jsonl")
    for split in ("train", "predict"):
        of_file, of_rows = (load(split, **{split: given}) for given in (file, FORMS[form]))
        assert [(p.messages, p.reference) for p in of_rows] == [(p.messages, p.reference) for p in of_file]
        assert {p.dataset for p in of_rows} == {"rows"}
    spec = DatasetSpec(FORMS[form], "solution", "level", where={"level": {"min": 2}}, limit=3, name="few")
    assert [(p.reference, p.dataset) for p in load("train", train=spec)] == [(k, "few") for k in "234"]
    assert [dict(row) for row in FORMS[form]] == ROWS
    assert {"problem": "0+1", "answer": 1}.items() <= ROWS[0].items()


def test_a_problem_that_an_environment_can_do_without_is_never_left_out_by_mistake():
    task = EnvironmentTask(Desk)
    problems = [("problem", {}), ("question", {"question": None}), ("prompt", {"prompt": "Go.", "answer": None})]
    loaded = [load("train", task=task, train=DatasetSpec([row], problem=name)) for name, row in problems]
    assert [prompt.messages[-1]["content"] for (prompt,) in loaded] == ["", "", "Go."]
    texts = [EnvironmentTask(Desk, instruction=" Play.").prompt({}), task.prompt({"problem": "2?", "answer": 2})]
    texts = [prompt.messages[-1]["content"] for prompt in texts]
    assert texts == [" Play.", f"2?{Boxed.instruction}"], "asked for where there is an answer, or by the option"
    with pytest.raises(ValueError, match=r"row 1: there is no column `qestion`\. The columns are: question"):
        [*load("train", task=task, train=DatasetSpec([{"question": "Go."}], problem="qestion"))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"problem": "1+1"}], "1 rows given in Python, row 1: there is no column `answer`"),
        ([{"problem": "\ud83d", "answer": "1"}], "row 1: `problem` must be valid Unicode"),
        (pandas.DataFrame(ROWS), r"list of dicts or a `datasets.Dataset`, but got DataFrame. Give .*from_pandas"),
        (datasets.DatasetDict(train=FORMS["Dataset"]), "but got DatasetDict. .*one split"),
        (DatasetSpec([]), "must hold at least one row"),
        ([ROWS, ROWS], "must have different names, but got 'rows'"),
        ("6 rows given in Python", "`data.train` must be a file or a name, but got '6 rows given in Python'"),
    ],
)
def test_a_mistake_names_the_row_and_the_next_step(given, said):
    with pytest.raises(ValueError, match=said):
        load("train", train=given)


def test_examples_are_left_out_of_lists_and_files_by_the_columns_that_each_dataset_names(tmp_path):
    other = [row | {"problem": row["problem"] + "+0"} for row in ROWS]
    shots = FewShot(number=2, dataset=DatasetSpec(other))
    assert len(load("train", train=ROWS, few_shot=shots)) == 6, "the lists have as many rows, and are not the same"
    table = [{"problem": "sums", "question": f"{k}", "result": f"{k}", "solution": f"\\boxed{{{k}}}"} for k in range(5)]
    train = DatasetSpec(write(tmp_path, table), "question", "result")
    write(tmp_path, table[::-1], "other.jsonl")
    (tmp_path / "sub").mkdir()
    for name in ("train.jsonl", "sub/../train.jsonl", "other.jsonl"):
        val = DatasetSpec(str(tmp_path / name), "question", "result")
        with pytest.warns(UserWarning, match=r"^2 of the 5 rows of (train|other) are left out of `data\.val`"):
            assert len(load("val", train=train, val=val, few_shot=FewShot(number=2))) == 3, name
    assert len(load("train", train=train, few_shot=FewShot(number=2))) == 3


# ---- what a task makes of a row: it may be anybody's


def mine(base, change):
    """A task of a user's whose prompts are changed."""
    return type("Mine", (base,), {"prompt": lambda self, row: change(super(type(self), self).prompt(row))})()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: None, "None"),
        (lambda p: replace(p, messages=[1, 2]), r"Prompt\(messages=\[1, 2\]"),
        (lambda p: replace(p, messages=[]), r"Prompt\(messages=\[\]"),
        (lambda p: replace(p, messages=[{"content": "1"}]), r"Prompt\(messages=\[\{'content': '1'\}\]"),
        (lambda p: replace(p, reference=12), "reference=12"),
        (lambda p: replace(p, task=None), "task=None"),
    ],
)
def test_a_prompt_that_is_something_else_is_an_error_that_names_the_task(change, message):
    message = rf"`Mine\.prompt` must return a `Prompt` of .*, but got .*{message}"
    with pytest.raises(ValueError, match=message):
        load("train", train=[{"problem": "7+5?", "answer": "12"}], task=mine(MathTask, change))
    with pytest.raises(ValueError, match=message):
        ArithmeticData(num_train=1, task=mine(ArithmeticTask, change)).load("train")[0].prompts[0]


def test_conversations_and_texts_pass_and_a_row_that_a_task_refuses_is_named(tmp_path):
    row = {"problem": "7+5?", "answer": "12"}
    for messages in ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+5?"}], "7+5?"):
        task = mine(MathTask, lambda p, m=messages: replace(p, messages=m))
        assert load(val=[row], task=task)[0].messages == messages
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: An arithmetic problem must be"):
        load(val=write(tmp_path, [row | {"problem": "7+5"}, row]), task=ArithmeticTask())

"""Cells of every type that files, Arrow and Python have, and folders that are no dataset."""

import datetime
from decimal import Decimal
from fractions import Fraction

import datasets
import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_lightning import Curriculum, MathData
from tests.core.data.recorder import write
from tests.core.data.test_sources import ROWS, load, parquet


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_numbers_that_are_none_for_a_task_are_named_with_their_type(tmp_path):
    """What Arrow and Python call a number, or a time, has more than one way to be written."""
    cells = [
        *(Decimal("1.50"), datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, 1, 2), datetime.time(1, 2)),
        *(datetime.timedelta(seconds=3), b"3", True),
    ]
    for cell in cells:
        message = rf"row 1: `answer` must be text or a number, but got .* of the type {type(cell).__name__}: write"
        for table in (
            parquet(tmp_path / f"{type(cell).__name__}.parquet", {"problem": ["p"], "answer": [cell]}),
            [{"problem": "p", "answer": cell}],
        ):
            with pytest.raises(ValueError, match=message):
                load(val=table)
    path = parquet(tmp_path / "level.parquet", {"problem": ["p"], "answer": ["1"], "x": [Decimal("1.5")]})
    with pytest.raises(ValueError, match=r"row 1: `x` must be a finite number \(int or float\), .* got Decimal"):
        load("train", train=path, curriculum=Curriculum(column="x", batches=1))
    for cell in (numpy.int64(3), Fraction(1, 3)):
        with pytest.raises(ValueError, match=rf"of the type {type(cell).__name__}: write"):
            load(val=[{"problem": "p", "answer": cell}])


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int64()), pa.struct({"a": pa.int64()}), pa.null()])
def test_columns_of_other_types_of_arrow_are_named_or_kept(tmp_path, kind):
    value = None if pa.types.is_null(kind) else [("a", 1)] if pa.types.is_map(kind) else {"a": 1}
    table = {"problem": ["p"], "answer": pa.array([value], kind)}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"`answer` must be text|Cannot load .* Arrow type map.*Check the file, or write"
    ):
        load(val=str(tmp_path / "a.parquet"))
    if not pa.types.is_map(kind):
        pq.write_table(pa.table(table | {"answer": ["1"], "x": table["answer"]}), tmp_path / "x.parquet")
        assert load(val=str(tmp_path / "x.parquet"))[0].columns["x"] == value


def test_numbers_of_every_width_are_read_as_they_were_written(tmp_path):
    """A float32 of 0.1 is no 0.10000000149011612, to which no answer would be equal."""
    columns = {
        "float32": pa.array([0.1], pa.float32()),
        "float16": pa.array([numpy.float16(0.1)], pa.float16()),
        "float64": pa.array([0.1]),
        "list": pa.array([[0.1, 2.5]], pa.list_(pa.float32())),
        "uint64": pa.array([2**64 - 1], pa.uint64()),
        "text": pa.array(["7" * 5000]),
    }
    read = {}
    for name, column in columns.items():
        pq.write_table(pa.table({"problem": column, "answer": column}), tmp_path / f"{name}.parquet")
        if name == "list":
            pq.write_table(pa.table({"problem": ["p"], "answer": column}), tmp_path / f"{name}.parquet")
        read[name] = load(val=str(tmp_path / f"{name}.parquet"))[0]
    assert [read[name].reference for name in ("float32", "float16", "float64", "list")] == ["0.1"] * 3 + ["0.1, 2.5"]
    assert read["float32"].messages[0]["content"].startswith("0.1 ")
    assert (read["uint64"].reference, read["text"].reference) == ("18446744073709551615", "7" * 5000)
    big = write(tmp_path, [f'{{"problem": "p", "answer": -{"7" * 300}}}'], "big.jsonl")
    assert load(val=big)[0].reference == "-" + "7" * 300


def test_whole_numbers_with_too_many_digits_are_named_wherever_they_stand(tmp_path):
    message = r"a whole number must have at most 4,300 digits, but one has more. Write it as text, between quotes\."
    for column in ("problem", "answer", "x"):
        row = {"problem": "p", "answer": "1"} | {column: 7**6000}  # 5,071 digits
        with pytest.raises(ValueError, match=rf"row 1: `{column}`: {message}"):
            load(val=[row])
    for text in (f'{{"x": -{"7" * 5000}}}', f'[{{"x": {"7" * 5000}}}]'):
        with pytest.raises(ValueError, match=rf"a.json, line 1: {message}"):
            load(val=write(tmp_path, [text], "a.json"))


@pytest.mark.parametrize("path", [".", "./", "..", "", "sub/..", "~", "/"])
def test_a_folder_without_a_name_is_no_dataset(path, tmp_path, monkeypatch):
    """`datasets` would search all of it, which may take hours, and metrics would have no name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    write(tmp_path, ROWS, "mine.jsonl")
    with pytest.raises(
        ValueError, match=r"The dataset `path` must be a file .*, a folder with a name, or .*, but got "
    ) as found:
        MathData(train=path)
    if path not in ("..", "/"):
        assert str(found.value).endswith(f"which is the folder {tmp_path}. Name a file of it, such as mine.jsonl.")

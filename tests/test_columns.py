"""The one list of the columns of a rollout: both forms of files read back what was written, and lack nothing unsaid."""

import datetime
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from grail_lightning.core.records.columns import (
    COLUMNS,
    OPTIONAL,
    PREDICTION,
    SAMPLE,
    TRAINING,
    append_lines,
    read_rows,
    write_parquet,
)
from grail_lightning.core.rollout.rows import rows_of
from tests.app.callbacks.scripted import box, prompts
from tests.app.callbacks.test_turns import Talks

VALUES = {"string": "ä\n", "bool": True, "int32": 3, "int64": 2**40, "float32": 0.5, "float64": 0.1}
VALUES |= {f"list<{kind}>": [VALUES[kind], None] for kind in ("int32", "float32", "string") if kind != "string"}
VALUES |= {"list<string>": ["a", "b"], "json": {"level": [1, "x"]}}


def _row(names):
    return {name: VALUES[COLUMNS[name].kind] for name in names}


@pytest.mark.parametrize("names", [TRAINING, PREDICTION])
def test_rows_of_parquet_are_read_as_they_were_written(names, tmp_path):
    row, plain = _row(names), [name for name in names if name not in OPTIONAL]
    write_parquet(tmp_path / "a.parquet", {name: [value, value] for name, value in row.items()}, names)
    assert list(read_rows(tmp_path / "a.parquet", names)) == [row, row]
    # Without the columns of an environment and of pictures, which are None when they are read.
    write_parquet(tmp_path / "b.parquet", {name: [row[name]] for name in plain}, names)
    assert pq.read_schema(tmp_path / "b.parquet").names == plain
    assert list(read_rows(tmp_path / "b.parquet", names)) == [row | dict.fromkeys(set(names) & set(OPTIONAL))]


def test_lines_of_json_are_read_as_they_were_written_and_a_torn_one_is_left_out(tmp_path):
    file, row = tmp_path / "a.jsonl", _row(SAMPLE)
    alone = row | dict.fromkeys(set(SAMPLE) & set(OPTIONAL)) | {"prediction": None, "response": "\ud800"}
    append_lines(file, [row])
    append_lines(file, [alone])
    with file.open("ab") as lines:
        lines.write(b'{"index": 1')
    assert list(read_rows(file, SAMPLE)) == [row, alone]


def test_text_that_is_no_unicode_and_values_that_json_lacks_are_written(tmp_path):
    cells = {"day": datetime.date(2026, 1, 2), "text": "\ud800"}
    row = _row(TRAINING) | {"response": "\ud800 x", "columns": cells}
    write_parquet(tmp_path / "a.parquet", {name: [value] for name, value in row.items()}, TRAINING)
    (found,) = read_rows(tmp_path / "a.parquet", TRAINING)
    assert (found["response"], found["columns"]) == ("? x", {"day": "2026-01-02", "text": "?"})


def test_both_forms_name_the_columns_that_a_file_lacks(tmp_path):
    rest = tuple(name for name in TRAINING if name not in ("layer", "problem", "turns"))
    write_parquet(tmp_path / "a.parquet", {name: [value] for name, value in _row(rest).items()}, rest)
    append_lines(tmp_path / "a.jsonl", [_row(rest)])
    for file, place in (("a.parquet", r"a\.parquet"), ("a.jsonl", r"a\.jsonl, line 1,")):
        with pytest.raises(
            ValueError, match=rf"{place} must have the columns .* but has no `problem`, `layer`\. Leave"
        ):
            list(read_rows(tmp_path / file, TRAINING))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet must have the columns .* but cannot be read: .* Leave it out"):
        list(read_rows(tmp_path / "a.parquet", TRAINING))


def test_a_batch_has_the_values_of_every_column_but_those_of_its_place_and_its_credit():
    batch = Talks().rollouts(prompts(2), 1)
    others = {"step", "rank", "index", "sample", "seed", *(set(PREDICTION) - set(TRAINING))}
    rows = rows_of(batch, COLUMNS)
    assert rows.keys() == COLUMNS.keys() - others
    assert {len(values) for values in rows.values()} == {2}
    assert (rows["prediction"], rows["advantage"]) == (["1", "2"], [None, None])
    assert rows["response"] == [f"so {box(1)}", f"1+1=2 {box(2)}"]
    plain = rows_of(batch.replace(turn=None, episodes=None), COLUMNS)
    assert plain.keys() == rows.keys() - set(OPTIONAL)


def test_the_list_of_columns_needs_no_torch():
    code = "import sys, grail_lightning.core.records.columns; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

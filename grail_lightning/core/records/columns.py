"""What is written about a rollout: the names, types and meanings of its columns, and the reading and writing of files.

Rollouts of training and predictions are rows of Parquet files. Samples of a test are lines of JSON. A column has one
name, one type and one meaning in all of them; `core.rollout.rows` makes its values. This file imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grail_lightning.core.runtime.files import whole_file
from grail_lightning.core.runtime.pages import page

Row = dict[str, Any]
"""The values of one rollout by the names of columns."""


class Column(NamedTuple):
    """A column of a rollout."""

    kind: str  # A type of pyarrow; ``list<…>`` for lists; ``json`` for any value, which is a text in Parquet.
    meaning: str


COLUMNS: dict[str, Column] = {
    "step": Column("int64", "optimiser steps after this batch, as in TensorBoard"),
    "rank": Column("int32", "the process that sampled the rollout"),
    "dataset": Column("string", "the dataset's name"),
    "problem": Column("string", "the problem's identity: a hash of dataset, messages and reference"),
    "index": Column("int64", "the place of the problem in the dataset, from 0"),
    "sample": Column("int32", "the number of the response to its problem, from 0"),
    "prompt": Column("string", "the prompt as people read it: text, or lines `role: content`"),
    "reference": Column("string", "the reference answer"),
    "response": Column("string", "the response without special tokens; in an environment its last turn"),
    "prediction": Column("string", "the answer that was graded; null without one"),
    "correct": Column("bool", "whether the verdict is `right`"),
    "status": Column("string", "the verdict"),
    "layer": Column("string", "the layer of the verifier that decided; of a program what became of it"),
    "reward": Column("float64", "the reward; null for a response that nothing scored"),
    "advantage": Column(
        "float32", "the advantage; in predictions +1 for a right and -1 for a wrong response, 0 without a reward"
    ),
    "finished": Column("bool", "whether the response ended by itself within the limit"),
    "num_tokens": Column("int32", "sampled tokens, the end token included"),
    "group": Column("int64", "the group; unique within step and rank, or within a file of predictions"),
    "seed": Column("int64", "the seed of the response's random numbers"),
    "token_ids": Column("list<int32>", "the token ids of the response; in an environment all behind the prompt"),
    "messages": Column("json", "the prompt: a conversation, or a text"),
    "columns": Column("json", "further columns of the problem's row; in samples numbers and short texts alone"),
    "tokens": Column("list<string>", "each token decoded by itself; in an environment its part of the whole text"),
    "token_starts": Column("list<int32>", "the first character of `response` that each token carries"),
    "token_stops": Column(
        "list<int32>",
        "the end of these characters, `response[start:stop]`; several tokens may share one, such as an emoji",
    ),
    "method": Column("string", "the name of the first credit method"),
    "weights": Column(
        "list<float32>",
        "the weight of each token by that method, what it adds to the advantage included: `A_it / A_i`, where right "
        "responses have the advantage 1 and wrong ones -1; `weights.NAME` of a further method",
    ),
    "scores": Column("list<float32>", "the raw scores, null if the method has none; `scores.NAME` of a further method"),
    "fallback": Column(
        "bool",
        "whether the method should have weighted the response but could not; `fallback.NAME` of a further method",
    ),
    "box_start": Column("int32", "the first character of the located answer with what marks it; null without one"),
    "box_stop": Column("int32", "the end of its characters"),
    "box_first_token": Column("int32", "its first token"),
    "box_last_token": Column("int32", "its last token, included"),
    "step_starts": Column("list<int32>", "the first character of each labelled step; null if the task labels none"),
    "step_stops": Column("list<int32>", "the end of its characters"),
    "step_kinds": Column("list<string>", "its kind: sound, slip, misconception, inherited, filler"),
    "num_turns": Column("int32", "the number of turns"),
    "num_calls": Column("int32", "the number of calls"),
    "num_invalid_calls": Column(
        "int32", "the number of calls that could not be read, name no tool, or have wrong arguments"
    ),
    "end": Column("string", "why it ended: answered, turns, tokens, context, failures"),
    "transcript": Column(
        "string",
        "what `reset` returned, what the policy wrote and what it was told, as text. Lines of either are indented, "
        "headings such as `[turn 2]` are not",
    ),
    "turns": Column(
        "list<int32>",
        "for each of the `token_ids` the number of the turn in which it was sampled, from 0, or -1 if the environment "
        "put it in",
    ),
    "prompt_ids": Column(
        "list<int32>", "the token ids of the prompt, with what the environment and the tools added to it"
    ),
    "episode": Column("string", "turns with calls, results, scores and states, as JSON for `predict --data.kept`"),
    "pictures": Column(
        "string",
        "JSON of the pictures, null without any: for each its `src` (a data URL, at most 256 pixels wide and high), "
        "`layers` of grids (left, top, width and height in shares of the picture, and the rows and columns of its "
        "tokens), and `scores`, the saliency of its tokens for the located answer, or null",
    ),
}

_ROLLOUT = (
    *("dataset", "problem", "prompt", "reference", "response", "prediction"),
    *("correct", "status", "layer", "reward", "finished", "num_tokens"),
)
_EPISODE = ("num_turns", "num_calls", "num_invalid_calls", "end", "transcript")
_TURNS = ("turns", "prompt_ids", "episode")
OPTIONAL = (*_EPISODE, *_TURNS, "pictures")
"""Columns that files have only if a rollout in them is in an environment, or has pictures."""
TRAINING = (
    *("step", "rank", *_ROLLOUT, "advantage", "group", "token_ids", "messages", "columns"),
    *(*_EPISODE, *_TURNS),
)
"""The columns of the files that `KeepRollouts` writes."""
PREDICTION = (
    *(*_ROLLOUT, "advantage", "group", "token_ids", "tokens", "token_starts", "token_stops"),
    *("method", "weights", "scores", "fallback", "box_start", "box_stop", "box_first_token", "box_last_token"),
    *("step_starts", "step_stops", "step_kinds", *_EPISODE, *_TURNS, "pictures"),
)
"""The columns of the files that `predict` writes."""
SAMPLE = ("index", "sample", *_ROLLOUT, "seed", "columns", *_EPISODE)
"""The columns of the samples of a test, which are lines of JSON."""


def column_kind(name: str) -> str:
    """The type of a column, also of one of a further credit method, such as ``weights.Uniform``."""
    return COLUMNS[name.partition(".")[0]].kind


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can hold but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def table_of(rows: Mapping[str, Sequence[Any]], names: Iterable[str]) -> Any:
    """A `pyarrow.Table` of the columns `names`, ``B`` values each; of the `OPTIONAL` ones those that `rows` has.

    The types are fixed, so that the files of different batches can be read as one table.
    """
    # pyarrow is imported where it is used, since help resolves the types of files that import this one.
    import pyarrow as pa

    def typed(kind: str) -> Any:
        if kind.startswith("list<"):
            return pa.list_(typed(kind[5:-1]))
        return pa.string() if kind == "json" else pa.type_for_alias(kind)

    there = [name for name in names if name in rows or name not in OPTIONAL]
    schema = pa.schema([(name, typed(column_kind(name))) for name in there])
    columns = {name: [_in_parquet(value, column_kind(name)) for value in rows[name]] for name in schema.names}
    return pa.table(columns, schema=schema)


def _in_parquet(value: Any, kind: str) -> Any:
    match kind:
        case "json":  # What JSON has no form for, such as a date, is text.
            return encodable(json.dumps(value, ensure_ascii=False, default=str))
        case "string" if value is not None:
            return encodable(value)
        case "list<string>" if value is not None:
            return [encodable(text) for text in value]
        case _:
            return value


def write_parquet(file: Path, rows: Mapping[str, Sequence[Any]], names: Iterable[str]) -> None:
    """Write the `table_of` columns to a Parquet file, which appears when it is complete."""
    import pyarrow.parquet as pq

    with whole_file(file) as unfinished:
        pq.write_table(table_of(rows, names), unfinished)


def line_of(row: Row) -> bytes:
    """A row as one line of JSON, in ASCII, without those of the `OPTIONAL` columns that are null."""
    cells = {name: value for name, value in row.items() if value is not None or name not in OPTIONAL}
    return (json.dumps(cells, allow_nan=False) + "\n").encode()


def append_lines(file: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file of JSON lines in a folder that exists; they are on the disk when this returns."""
    with file.open("ab") as lines:
        lines.writelines(map(line_of, rows))
        lines.flush()
        os.fsync(lines.fileno())


def read_rows(file: Path, names: Iterable[str]) -> Iterator[Row]:
    """The rows of a file of Parquet or, with the suffix ``.jsonl``, of JSON lines, with all columns that it has.

    It is a ValueError if the file is damaged or lacks one of the columns `names`; of the `OPTIONAL` ones those that it
    lacks are None. A torn last line, which a process that was killed may leave, is left out.
    """
    yield from (_read_lines if file.suffix == ".jsonl" else _read_parquet)(file, tuple(names))


def _read_lines(file: Path, names: Sequence[str]) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            place = f"{file}, line {number},"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise _refusal(place, f"is {line[:60]!a}")
            _check_columns(place, row, names)
            yield dict.fromkeys(names) | row


def _read_parquet(file: Path, names: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as source:
            _check_columns(str(file), source.schema_arrow.names, names)
            texts = [name for name in source.schema_arrow.names if name in COLUMNS and COLUMNS[name].kind == "json"]
            for batch in source.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield dict.fromkeys(names) | row | {name: json.loads(row[name]) for name in texts}
    except (pa.ArrowException, OSError) as error:
        raise _refusal(str(file), f"cannot be read: {error}") from None


def _check_columns(place: str, there: Iterable[str], names: Sequence[str]) -> None:
    if missing := [f"`{name}`" for name in names if name not in OPTIONAL and name not in there]:
        raise _refusal(place, f"has no {', '.join(missing)}")


def _refusal(place: str, fault: str) -> ValueError:
    return ValueError(
        f"{place} must have the columns of a rollout that this version writes ({page('reference/files.md')}), but "
        f"{fault}. Leave it out, or make it anew: `predict` writes predictions, `KeepRollouts` rollouts of training, "
        "`test` samples."
    )

"""Functions that read, filter and check the rows of datasets on disk and on the hub."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from grail_lightning.runtime.hub import hub_or_cache
from grail_lightning.tasks.import_path import GIVEN, refuse_given

if TYPE_CHECKING:
    from datasets import Dataset

    Rows: TypeAlias = Sequence[Mapping[str, Any]] | Dataset
    PathOrRows: TypeAlias = Any  # `str | Rows` when it is made, `str` afterwards.
else:
    PathOrRows = str  # What YAML can say.

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset by name or path, with the rows and columns that are used.

    Args:
        path: A .jsonl, .json or .parquet file, a folder with a dataset, or the name of a dataset on the hub. From
            Python also rows: a list of dicts, or a `datasets.Dataset`.
        problem: The column of the problem text.
        answer: The column of the reference answer: text or a number, a list of answers, or a worked solution whose last
            box is the answer.
        split: The split of a dataset on the hub or in a folder.
        subset: The configuration name of a dataset on the hub.
        weight: The share of the training draws, relative to the weights of the other training datasets.
        where: A filter of rows: column -> value, list of values, or {min: …, max: …} (both included).
        limit: The largest number of rows; the first rows that fit `where` are used.
        name: The name under which metrics are reported; default the last part of the path.
    """

    path: PathOrRows
    problem: str = "problem"
    answer: str = "answer"
    split: str = "train"
    subset: str | None = None
    weight: float = 1.0
    where: dict[str, Any] | None = None
    limit: int | None = None
    name: str | None = None
    rows: ClassVar[Any] = None  # An instance has its own, which no config can hold.

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            table = hasattr(self.path, "select_columns") and not isinstance(self.path, Mapping)  # No `DatasetDict`.
            if not (isinstance(self.path, list | tuple) or (table and hasattr(self.path, "__len__"))):
                raise ValueError(
                    "A dataset must be a path, a list of dicts or a `datasets.Dataset`, but got "
                    f"{type(self.path).__name__}. Give `df.to_dict('records')` of a table, or one split."
                )
            object.__setattr__(self, "rows", self.path)
            object.__setattr__(self, "path", f"{len(self.path)} rows {GIVEN}")
        object.__setattr__(self, "path", str(self.path))
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"`weight` of {self.path} must be a positive number, but got {self.weight}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` of {self.path} must be at least 1 row, but got {self.limit}.")
        for column, wanted in (self.where or {}).items():
            if isinstance(wanted, Mapping) and not ({"min", "max"} >= set(wanted) != set()):
                raise ValueError(
                    f"`where` of {self.path} must give for `{column}` a value, a list of values, or min and/or max, "
                    f"but got {dict(wanted)}."
                )

    @property
    def label(self) -> str:
        """The name under which metrics are reported."""
        path = Path("rows" if self.rows is not None else self.path)
        return self.name or (path.stem if self.is_file else path.name)

    @property
    def is_file(self) -> bool:
        """Whether the path names a file rather than a folder or a dataset on the hub."""
        return Path(self.path).suffix in FILE_SUFFIXES


@dataclass(frozen=True)
class Table:
    """The rows of one dataset and their positions in the source.

    Attributes:
        source: The path, or the name on the hub.
        rows: A sequence of mappings from column to value.
        lines: The line number of each row, if the source has lines.
    """

    source: str
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[int] | None = None

    def place(self, index: int) -> str:
        """The source and the line or number of a row, for error messages."""
        return f"{self.source}, " + (f"row {index + 1}" if self.lines is None else f"line {self.lines[index]}")

    def columns(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """An iterator over the rows, with at least those named columns that exist."""
        rows: Any = self.rows
        if hasattr(rows, "select_columns"):  # The other columns of an Arrow table stay on disk.
            known = [name for name in dict.fromkeys(names) if name in rows.column_names]
            rows = rows.select_columns(known) if known else rows
        yield from rows


def check_path(spec: DatasetSpec) -> None:
    """Check early that the path of a dataset exists or may be a name on the hub.

    Raises:
        ValueError: If the path does not exist and cannot be the name of a dataset on the hub.
    """
    if spec.rows is not None:
        return
    refuse_given("path", spec.path)
    path = Path(spec.path).expanduser()
    file_name = "/" not in spec.path and path.suffix[1:].isalpha()  # A dataset of the hub is called owner/name.
    if path.is_file() and not spec.is_file:
        raise ValueError(f"`path` must be a file of type {', '.join(FILE_SUFFIXES)}, but got {spec.path}.")
    if path.is_dir() and spec.is_file:
        raise ValueError(f"The dataset `path` {spec.path} must be a file, but it is a folder. Name the file in it.")
    if path.exists():
        return
    if spec.is_file or file_name or spec.path.startswith((".", "/", "~")) or spec.path.count("/") > 1 or not spec.path:
        raise ValueError(
            f"The dataset `path` {spec.path!r} does not exist (looked in {Path.cwd()}). Give a file "
            f"({', '.join(FILE_SUFFIXES)}), a folder, or the name of a dataset on the hub, such as owner/name."
        )


def read_table(spec: DatasetSpec) -> Table:
    """The rows of a dataset, unfiltered.

    Raises:
        ValueError: If there are none or they cannot be read. The message names file and line.
    """
    suffix = Path(spec.path).suffix
    path = Path(spec.path).expanduser()
    if spec.rows is not None:
        table = _checked(Table(spec.path, spec.rows))
    elif suffix in (".jsonl", ".json"):
        table = _read_json(spec.path, path)
    elif suffix == ".parquet":
        _check_parquet(path)
        table = Table(spec.path, _load("parquet", spec.path, data_files=str(path), split="train"))
    else:
        builder = str(path) if path.is_dir() else spec.path
        table = Table(spec.path, _load(builder, spec.path, name=spec.subset, split=spec.split))
    if not len(table.rows):
        raise ValueError(f"{spec.path} must hold at least one row, but it is empty.")
    return table


def select_rows(table: Table, spec: DatasetSpec) -> list[int]:
    """The rows that `spec` selects, each with a problem and an answer.

    Returns:
        Indices into `table.rows`, ascending.

    Raises:
        ValueError: If a row lacks a named column, its problem or its answer is empty, or no row fits the filter.
    """
    where = spec.where or {}
    kept: list[int] = []
    for index, row in enumerate(table.columns([spec.problem, spec.answer, *where])):
        cell = partial(_cell, table, index, row)
        if all(_fits(cell(column), wanted, f"{table.place(index)}: `{column}`") for column, wanted in where.items()):
            for column in (spec.problem, spec.answer):
                place = f"{table.place(index)}: `{column}`"
                answers = answers_in(cell(column)) if column == spec.answer else [cell(column)]
                for value in answers or [None]:
                    _check_text(value, place)
            kept.append(index)
            if len(kept) == spec.limit:
                break
    if not kept:
        seen = {c: sorted({repr(row[c]) for row in table.columns(list(where))})[:5] for c in where}
        raise ValueError(f"No row of {table.source} fits `where` {where}. Values that occur: {seen}.")
    return kept


def answers_in(value: object) -> list[object]:
    """The answers that a cell holds: those of a list, such as OlympiadBench's `final_answer`, or the one that it is."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_json(source: str, path: Path) -> Table:
    """Read JSON or JSON lines. The library `datasets` reports no line numbers and rejects columns of mixed types."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} must be UTF-8 text, but byte {error.start} is not. Convert it to UTF-8.") from None
    if text.lstrip().startswith("["):
        rows, lines = _parse(text, source, 1), None
    else:
        numbered = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        rows, lines = [_parse(line, source, n) for n, line in numbered], [n for n, _ in numbered]
    return _checked(Table(source, rows, lines))


def _checked(table: Table) -> Table:
    """The table, if each of its rows has named columns and valid text."""
    for index, row in enumerate(table.rows if isinstance(table.rows, list | tuple) else ()):
        if not isinstance(row, Mapping):
            raise ValueError(f"{table.place(index)}: expected an object with named columns, but got {_short(row)}.")
        _check_unicode(row, table.place(index))
    return table


def _parse(text: str, source: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source}, line {line + error.lineno - 1}: malformed JSON ({error.msg}, column {error.colno}). "
            "A .jsonl file must hold one JSON object a line."
        ) from None
    except ValueError as error:  # Python refuses to convert a whole number with too many digits.
        raise ValueError(f"{source}, line {line}: {error}. Write the number as text.") from None


def _check_unicode(row: Mapping[str, Any], place: str) -> None:
    r"""Check for half of a surrogate pair, such as ``\ud83d``: JSON allows it, tokenizers and Parquet do not."""
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place}: `{_short(column)[1:-1]}` must be valid Unicode, but holds half of a surrogate pair, "
                f"{error.object[error.start]!r}. Write the whole character, or remove it."
            ) from None


def _check_parquet(path: Path) -> None:
    """Check the end of a Parquet file, where its schema is."""
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except (ValueError, OSError) as error:  # `ArrowInvalid` is a ValueError.
        raise ValueError(f"{path} must be a whole Parquet file, but got: {error} Write it again.") from None


def _load(builder: str, source: str, /, **options: object) -> Any:
    import datasets

    local = builder == "parquet" or Path(builder).is_dir()
    with _without_bars() if local else hub_or_cache() as reason:
        try:
            return datasets.load_dataset(builder, **options)
        # The library, the network and the hub raise many types. The user needs the name, the reason and the next step.
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
            if reason and isinstance(error, ConnectionError | FileNotFoundError):
                said = f"there is no such file or folder here or in the cache, and the hub cannot be reached ({reason})"
            raise ValueError(
                f"Cannot load the dataset {source!r}: {said}. Check its name, `split` and `subset`, and the network; "
                "or give a .jsonl or .parquet file."
            ) from error


@contextmanager
def _without_bars() -> Iterator[str]:
    """No progress bars of `datasets`, which would stand above the message about a file that is wrong."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield ""
    finally:
        if shown:
            datasets.enable_progress_bars()


def _cell(table: Table, index: int, row: Mapping[str, object], column: str) -> object:
    if column not in row:
        there = getattr(table.rows, "column_names", None) or list(row)
        raise ValueError(
            f"{table.place(index)}: there is no column `{column}`. The columns are: {', '.join(map(str, there))}. "
            "Name the right one with `problem`, `answer` or `where` of the dataset."
        )
    return row[column]


def _check_text(value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise ValueError(f"{place} must be text or a number, but got {_short(value)}.")
    if value is None or not str(value).strip():
        raise ValueError(f"{place} must not be empty. Fill it in, remove the row, or leave it out by `where`.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{place} must be a finite number, but got {value}: a missing value, or beyond a float's range. "
            "Write the number as text, remove the row, or leave it out by `where`."
        )


def _fits(value: Any, wanted: object, place: str) -> bool:
    if isinstance(wanted, list | tuple):
        return value in wanted
    if not isinstance(wanted, Mapping):
        return bool(value == wanted)
    try:
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    except TypeError:
        raise ValueError(
            f"{place} must be comparable with {dict(wanted)}, but got {_short(value)}. "
            "Give a list of values instead of min and max."
        ) from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Datasets on disk and on the hub: their options, and functions that read, filter and check their rows."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.files import looked_in
from grail_lightning.core.runtime.import_path import GIVEN, refuse_given

if TYPE_CHECKING:
    from datasets import Dataset

    Rows: TypeAlias = Sequence[Mapping[str, Any]] | Dataset
    PathOrRows: TypeAlias = Any  # `str | Rows` when it is made, `str` afterwards.
else:
    PathOrRows = str  # What YAML can say.

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_TOO_MANY_DIGITS = (
    f"a whole number must have at most {sys.get_int_max_str_digits():,} digits, but one has more. Write it as text, "
    "between quotes."
)


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset by name or path, with the rows and columns that are used.

    Args:
        path: A .jsonl, .json or .parquet file, a folder with a dataset, or the name of a dataset on the hub. A folder
            may have ChartQA's form: `SPLIT/*.json`, lists of {imgname, query, label}, and `SPLIT/png/`. From Python
            also rows: a list of dicts, or a `datasets.Dataset`.
        problem: The column of the problem, a text or a conversation as a list of messages. Without a column of the
            default name it is TRL's `prompt`, if the data has this.
        answer: The column of the reference answer: text or a number, a list of answers, or a worked solution whose last
            box is the answer.
        images: The column of a picture or of a list of them: paths (relative ones from the file's folder), images of
            Pillow, or bytes. Their places are ``<image>`` in the problem; without one they come before it.
        split: The split of a dataset on the hub or in a folder.
        subset: The configuration name of a dataset on the hub.
        weight: The share of the training draws, relative to the weights of the other training datasets.
        where: A filter of rows: column -> value, list of values, or {min: …, max: …} (both included).
        skip: The number of rows that are left out at the beginning, of those that fit `where`: what another dataset
            takes of the same table by its `limit`, such as problems held out for validation.
        limit: The largest number of rows; the first ones that fit `where`, after those left out, are used.
        name: The name under which metrics are reported; default the last part of the path.
    """

    path: PathOrRows
    problem: str = "problem"
    answer: str = "answer"
    images: str | None = None
    split: str = "train"
    subset: str | None = None
    weight: float = 1.0
    where: dict[str, Any] | None = None
    skip: int = 0
    limit: int | None = None
    name: str | None = None
    rows: ClassVar[Any] = None  # An instance has its own, which no config can hold.

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            table = hasattr(self.path, "select_columns") and not isinstance(self.path, Mapping)  # No `DatasetDict`.
            if not (isinstance(self.path, list | tuple) or (table and hasattr(self.path, "__len__"))):
                raise ValueError(
                    "A dataset must be a path, a list of dicts or a `datasets.Dataset`, but got "
                    f"{type(self.path).__name__}. Give `datasets.Dataset.from_pandas(df)` of a table, or one split."
                )
            object.__setattr__(self, "rows", self.path)
            object.__setattr__(self, "path", f"{len(self.path)} rows {GIVEN}")
        object.__setattr__(self, "path", str(self.path))
        check_option("skip", self.skip, "[0, inf)")
        check_option("limit", 1 if self.limit is None else self.limit, "[1, inf)")
        check_option(f"weight of {self.path}", self.weight, "(0, inf)")
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
    def source(self) -> tuple[object, ...]:
        """The table, whatever is taken of it."""
        path = Path(self.path).expanduser()
        return str(path.resolve()) if path.exists() else self.path, self.subset, self.split, id(self.rows)

    @property
    def is_file(self) -> bool:
        """Whether the path names a file rather than a folder or a dataset on the hub."""
        return Path(self.path).suffix in _FILE_SUFFIXES


@dataclass(frozen=True)
class Table:
    """The rows of one dataset and their positions in the source."""

    source: str  # The path, or the name on the hub.
    rows: Sequence[Mapping[str, Any]]  # Mappings from column to value.
    places: Sequence[str] | None = None  # File and line of each row, if they are not just its number.

    def place(self, index: int) -> str:
        """The source and the line or number of a row, for error messages."""
        return f"{self.source}, row {index + 1}" if self.places is None else self.places[index]

    @property
    def folder(self) -> Path | None:
        """The folder of a table that is a file."""
        path = Path(self.source).expanduser()
        return path.parent if path.is_file() else None

    def columns(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """An iterator over the rows, with at least those named columns that exist."""
        rows: Any = self.rows
        if hasattr(rows, "select_columns"):  # The other columns of an Arrow table stay on disk.
            available_names = [name for name in dict.fromkeys(names) if name in rows.column_names]
            rows = rows.select_columns(available_names) if available_names else rows
        yield from rows


def check_path(spec: DatasetSpec, option: str = "path") -> None:
    """Check early that the path of a dataset, which `option` sets, exists, or may be a name on the hub."""
    if spec.rows is not None:
        return
    refuse_given(option, spec.path)
    path = Path(spec.path).expanduser()
    if Path(spec.path).name in ("", "..", "~"):  # `datasets` would search all of it for files, and has no name for it.
        files = sorted(file.name for file in path.glob("*") if file.suffix in _FILE_SUFFIXES)
        raise ValueError(
            f"The dataset `path` must be a file ({', '.join(_FILE_SUFFIXES)}), a folder with a name, or a dataset on "
            f"the hub, but got {spec.path!r}, which is the folder {path.resolve()}. "
            + (f"Name a file of it, such as {files[0]}." if files else "It holds no such file.")
        )
    if path.exists():
        if path.is_file() != spec.is_file:
            suffixes = ", ".join(_FILE_SUFFIXES)
            raise ValueError(f"`{option}` must be a file of type {suffixes} or a folder, but got {path}.")
        return
    mistyped_file = "/" not in spec.path and path.suffix[1:].isalpha()  # A dataset of the hub is called owner/name.
    if spec.is_file or mistyped_file or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", spec.path):
        raise ValueError(
            f"`{option}`: the dataset `path` {spec.path!r} does not exist ({looked_in()}). Give a file "
            f"({', '.join(_FILE_SUFFIXES)}), a folder, or the name of a dataset on the hub, such as owner/name."
        )


def is_local(spec: DatasetSpec) -> bool:
    """Whether the path names a file, or something that is there, rather than a dataset on the hub."""
    return spec.rows is not None or spec.is_file or Path(spec.path).expanduser().exists()


def in_folder(spec: DatasetSpec, folder: str) -> DatasetSpec:
    """The dataset as the file of a folder that has its name; a local one unchanged."""
    if is_local(spec):
        return spec
    candidates = [Path(folder).expanduser() / f"{spec.label}{suffix}" for suffix in _FILE_SUFFIXES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ValueError(
            f"`data.folder` {folder!r} must hold {spec.label}.jsonl (or {', '.join(_FILE_SUFFIXES[1:])}), but does not "
            f"({looked_in()})."
            " Put the file there, give its place as `path`, or leave `data.folder` out to read the hub."
        )
    return replace(spec, path=str(file), name=spec.label, subset=None, split="train")


def with_columns_of(spec: DatasetSpec, table: Table) -> DatasetSpec:
    """The dataset with the columns that its copy has: those that it names, else `problem` and `answer`."""
    columns = table.rows[0]
    return replace(
        spec,
        problem=spec.problem if spec.problem in columns else "problem",
        answer=spec.answer if spec.answer in columns else "answer",
    )


def _chart_folder(spec: DatasetSpec) -> Path | None:
    """The folder of a split in ChartQA's form, with pictures in ``png``; None if the path has another form."""
    path = Path(spec.path).expanduser()
    if spec.rows is not None or not any(path.glob("*/png/")):
        return None
    if not (path / spec.split / "png").is_dir():
        there = ", ".join(sorted(folder.parent.name for folder in path.glob("*/png/")))
        raise ValueError(f"{path} must have a folder for `split` {spec.split!r} with `png` in it, but has: {there}.")
    return path / spec.split


def with_chart_columns(spec: DatasetSpec) -> DatasetSpec:
    """The dataset with ChartQA's columns if it has its form; another one unchanged."""
    if _chart_folder(spec) is None:
        return spec
    return replace(spec, problem="query", answer="label", images="imgname")


def _read_charts(folder: Path) -> Table:
    rows: list[Any] = []
    places: list[str] = []
    for file in sorted(folder.glob("*.json")):
        part = _checked(_read_json(str(file), file))
        rows += [dict(row, imgname=str(folder / "png" / str(row.get("imgname", "")))) for row in part.rows]
        places += [part.place(index) for index in range(len(part.rows))]
    return Table(str(folder), rows, places)


def metric_name(text: str) -> str:
    """A text in a form that a metric's name may contain between two slashes."""
    return re.sub(r"[^\w.+-]", "_", text)


def metric_names(datasets: Iterable[str]) -> dict[str, str]:
    """The name of each dataset in a form that a metric's name may contain, without a slash or an @; all different."""
    names: dict[str, str] = {}
    for dataset in datasets:
        name = metric_name(dataset)
        if name in names.values():
            raise ValueError(
                f"Datasets that are evaluated together must have different names, but got {dataset!r} after one that "
                f"is `{name}` in the names of metrics, too. Set `name` of one of them."
            )
        names[dataset] = name
    return names


def read_table(spec: DatasetSpec) -> Table:
    """The rows of a dataset, unfiltered; a ValueError that names file and line if they cannot be read."""
    path = Path(spec.path).expanduser()
    if spec.rows is not None:
        table = _checked(Table(spec.path, _with_encoded(spec.rows, spec.images)))
    elif (charts := _chart_folder(spec)) is not None:
        table = _read_charts(charts)
    elif path.suffix in (".jsonl", ".json"):
        table = _checked(_read_json(spec.path, path))
    elif path.suffix == ".parquet":
        rows = _load("parquet", spec.path, data_files=str(path), split="train") if _has_rows(path) else []
        table = Table(spec.path, _with_encoded(rows, spec.images))
    else:
        builder = str(path) if path.is_dir() else spec.path
        rows = _load(builder, spec.path, name=spec.subset, split=spec.split)
        table = Table(spec.path, _with_encoded(rows, spec.images))
    if not len(table.rows):
        raise ValueError(f"{spec.path} must hold at least one row, but it is empty.")
    return table


def _with_encoded(rows: Any, column: str | None) -> Any:
    """Rows whose pictures are not decoded on access; a broken one can then be named with its row."""
    if column is None or column not in getattr(rows, "features", {}):
        return rows
    from datasets import Image, List

    feature = rows.features[column]
    if isinstance(feature, Image):
        return rows.cast_column(column, Image(decode=False))
    if isinstance(getattr(feature, "feature", None), Image):
        return rows.cast_column(column, List(Image(decode=False)))
    return rows


def _read_json(source: str, path: Path) -> Table:
    """The rows of a JSON list, or of a file with one object a line.

    Not by `datasets.load_dataset("json")`, which changes answers without a word: 3 beside a decimal becomes 3.0, a
    whole number of 30 digits loses some, and "2024-05-01" becomes a time. It does not count lines either.
    """
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if data.lstrip().startswith(b"["):
        return Table(source, _parse(data, source, 1))
    numbered = [(n, line) for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    rows = [_parse(line, source, n) for n, line in numbered]
    return Table(source, rows, [f"{source}, line {n}" for n, _ in numbered])


def _parse(text: bytes, source: str, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # Also for bytes that are not UTF-8.
        reason: object = error
        if type(error) is ValueError:  # of `int`, whose time is quadratic
            raise ValueError(f"{source}, line {line}: {_TOO_MANY_DIGITS}") from None
        if isinstance(error, json.JSONDecodeError):  # Its text has a line number of its own, counted in `text`.
            line, reason = line + error.lineno - 1, f"{error.msg} at column {error.colno}"
        raise ValueError(
            f"{source}, line {line}: malformed JSON ({reason}). It must be UTF-8, an object a line."
        ) from None


def _checked(table: Table) -> Table:
    r"""The table, whose rows must be objects without half of a surrogate pair (``\ud83d``)."""
    for index, row in enumerate(table.rows if isinstance(table.rows, list | tuple) else ()):
        if not isinstance(row, Mapping):
            raise ValueError(f"{table.place(index)}: expected an object with named columns, but got {row!r:.80}.")
        for column, value in row.items():
            try:  # Tokenizers and Parquet would stop at it, hours later perhaps.
                json.dumps([column, value], ensure_ascii=False, default=str).encode()
            except UnicodeEncodeError:
                place = f"{table.place(index)}: `{ascii(column)[1:-1]}`"
                raise ValueError(f"{place} must be valid Unicode, but holds half of a surrogate pair.") from None
            except ValueError as error:
                reason = error if "Circular" in str(error) else _TOO_MANY_DIGITS
                raise ValueError(f"{table.place(index)}: `{column}`: {reason}") from None
    return table


def _has_rows(path: Path) -> bool:
    """Whether a Parquet file has rows, without which `datasets` cannot read it. What is no such file it refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return bool(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError):
        return True


def _load(builder: str, source: str, /, **options: object) -> Any:
    import datasets

    advice = "Check its name, `split` and `subset`, and the network; or give a .jsonl or .parquet file."
    if Path(source).expanduser().exists():
        advice = "Check the file, or write its rows to a .jsonl file."
        datasets.disable_progress_bars()  # They would stand above the message about a file that is wrong.
    try:
        return datasets.load_dataset(builder, **options)
    except Exception as error:  # The library, the network and the hub raise many types.
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())}".rstrip(".")
        raise ValueError(f"Cannot load the dataset {source!r}: {reason}. {advice}") from error

"""Copies of datasets in one folder, which are read instead of the hub. A path that is local is read as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grail_lightning.data.sources import FILE_SUFFIXES, DatasetSpec, Table


def is_local(spec: DatasetSpec) -> bool:
    """Whether the path names a file, or something that is there, rather than a dataset on the hub."""
    return spec.rows is not None or spec.is_file or Path(spec.path).expanduser().exists()


def in_folder(spec: DatasetSpec, folder: str) -> DatasetSpec:
    """The dataset as the file of a folder that has its name; a local one unchanged.

    Raises:
        ValueError: If there is no such file.
    """
    if is_local(spec):
        return spec
    place = Path(folder).expanduser()
    candidates = (place / f"{spec.label}{suffix}" for suffix in FILE_SUFFIXES)
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        there = sorted(found.name for found in place.iterdir())[:10] if place.is_dir() else []
        holds = f"it holds {', '.join(there)}" if there else "it holds no file" if place.is_dir() else "it is no folder"
        raise ValueError(
            f"`data.folder` {folder!r} must hold {spec.label}.jsonl (or {', '.join(FILE_SUFFIXES[1:])}), but {holds}. "
            "Put the file there, give its place as `path`, or leave `data.folder` out to read the hub."
        )
    return replace(spec, path=str(file), name=spec.label, subset=None, split="train")


def with_columns_of(spec: DatasetSpec, table: Table) -> DatasetSpec:
    """The dataset with the columns that its copy has: those that it names, else `problem` and `answer`."""
    there = table.rows[0]
    return replace(
        spec,
        problem=spec.problem if spec.problem in there else "problem",
        answer=spec.answer if spec.answer in there else "answer",
    )

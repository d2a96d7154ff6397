"""Rollouts with the token credit of several methods, read from Parquet files of predictions.

Shapes: ``T`` tokens of a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUIRED = ("prompt", "response", "correct", "token_ids", "tokens", "token_starts", "token_stops", "weights")
_BATCH_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The token credit that a method gives to a rollout.

    Attributes:
        weights: ``T`` weights; None if the method gave none.
        scores: ``T`` scores; None if the method has none.
        fallback: Whether the method should have weighted the rollout but could not.
    """

    weights: list[float] | None
    scores: list[float] | None
    fallback: bool


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A rollout as the page shows it.

    Attributes:
        row: The columns of the Parquet file.
        methods: The credit of each method by its name.
    """

    row: dict[str, Any]
    methods: dict[str, Credit] = field(default_factory=dict)

    @property
    def problem(self) -> tuple[str, str, str]:
        """What the rollouts of a group have in common: dataset, prompt and reference."""
        return tuple(str(self.row.get(name) or "") for name in ("dataset", "prompt", "reference"))  # type: ignore[return-value]


def read_rollouts(files: Sequence[Path], max_rollouts: int) -> tuple[list[Rollout], int]:
    """The rollouts of one or several files. A rollout that is in several files has the methods of all of them.

    Rollouts are the same if dataset, prompt, reference and tokens are equal; the second of two equal ones in a file is
    the second in another file. The rollouts of one prompt are kept together: the last group is left out if the limit
    would cut it, unless it is the only one.

    Args:
        files: Files that `PredictionWriter` wrote.
        max_rollouts: The largest number of rollouts.

    Returns:
        The rollouts in the order of the files, and the number of rollouts that there are.

    Raises:
        ValueError: If a file is no Parquet file, lacks a column, or has no rows, or `max_rollouts` is not positive.
    """
    if max_rollouts < 1:
        raise ValueError(f"`max_rollouts` must be at least 1, but got {max_rollouts}.")
    rollouts_by_key: dict[tuple[Any, ...], Rollout] = {}
    left: dict[tuple[Any, ...], Rollout] = {}
    taken: set[str] = set()
    for file in files:
        names = _method_names(file, taken)
        taken |= set(names.values())
        occurrences: Counter[tuple[Any, ...]] = Counter()
        for row in _rows(file):
            identity = (Rollout(row=row).problem, tuple(row["token_ids"]))
            key = (*identity, occurrences[identity])
            occurrences[identity] += 1
            if key not in rollouts_by_key and len(rollouts_by_key) == max_rollouts:
                left[key] = Rollout(row=row) if not left else next(iter(left.values()))
                if len(files) == 1:
                    break  # The rest of a large file need not be read.
                continue
            rollout = rollouts_by_key.setdefault(key, Rollout(row=row))
            rollout.methods |= {name: _credit(row, suffix) for suffix, name in names.items()}
    if not rollouts_by_key:
        raise ValueError(f"{', '.join(map(str, files))} must hold at least one rollout, but got none. Predict first.")
    rollouts = list(rollouts_by_key.values())
    if left and (cut := next(iter(left.values())).problem) == rollouts[-1].problem != rollouts[0].problem:
        rollouts = [rollout for rollout in rollouts if rollout.problem != cut]
    import pyarrow.parquet as pq

    return rollouts, pq.read_metadata(files[0]).num_rows if len(files) == 1 else len(rollouts_by_key) + len(left)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as source:
        for batch in source.iter_batches(batch_size=_BATCH_ROWS):
            yield from batch.to_pylist()


def _method_names(file: Path, taken: set[str]) -> dict[str, str]:
    """The methods of a file: the suffix of the columns of each, and its name, which no other file has."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = pq.read_schema(file).names
    except (OSError, pa.ArrowException) as error:
        said = "there is no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        raise ValueError(
            f"{file} must be a Parquet file that `grail-lightning predict` wrote, but got: {said.rstrip('.')}. Correct "
            "the path."
        ) from None
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise ValueError(
            f"{file} must be a Parquet file that `grail-lightning predict` wrote, but it has no column "
            f"{', '.join(f'`{name}`' for name in missing)}. Texts without credit get it by `predict`."
        )
    first = next((str(row["method"]) for row in _rows(file) if row.get("method")), file.stem)
    suffixes = {"": first, **{name[7:]: name[8:] for name in columns if name.startswith("weights.")}}
    return {suffix: _unused(name, file, taken) for suffix, name in suffixes.items()}


def _unused(name: str, file: Path, taken: set[str]) -> str:
    names = (name, f"{name} ({file.stem})", *(f"{name} ({number})" for number in range(2, len(taken) + 3)))
    return next(other for other in names if other not in taken)


def _credit(row: dict[str, Any], suffix: str) -> Credit:
    return Credit(
        weights=row[f"weights{suffix}"],
        scores=row.get(f"scores{suffix}"),
        fallback=bool(row.get(f"fallback{suffix}")),
    )

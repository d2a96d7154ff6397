"""Rollouts with the token credit of several methods, read from Parquet files of predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_REQUIRED = ("prompt", "response", "correct", "token_ids", "tokens", "token_starts", "token_stops", "weights")
_CREDIT = ("weights", "scores", "fallback")


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A rollout as the page shows it.

    Attributes:
        row: The columns of the Parquet file.
        methods: The credit of each method by its name: `weights` and `scores`, a list of as many numbers as the rollout
            has tokens or None, and `fallback`, whether the method should have weighted the rollout but could not.
    """

    row: dict[str, Any]
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def problem(self) -> tuple[str, ...]:
        """What the rollouts of a group have in common: dataset, prompt and reference."""
        return tuple(str(self.row.get(name) or "") for name in ("dataset", "prompt", "reference"))


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
    shown: dict[tuple[Any, ...], Rollout] = {}
    left_out: dict[tuple[Any, ...], None] = {}
    names: set[str] = set()
    for file in files:
        methods = {suffix: _unused(name, file, names) for suffix, name in _methods(file).items()}
        names |= set(methods.values())
        occurrences: Counter[tuple[Any, ...]] = Counter()
        for row in _rows(file):
            rollout = Rollout(row=row)
            same = (rollout.problem, tuple(row["token_ids"]))
            occurrences[same] += 1
            key = (*same, occurrences[same])
            if key not in shown and len(shown) == max_rollouts:
                left_out[key] = None
                if len(files) == 1:
                    break  # The rest of a large file need not be read.
            else:
                credit = {name: {of: row.get(of + suffix) for of in _CREDIT} for suffix, name in methods.items()}
                shown.setdefault(key, rollout).methods |= credit
    if not shown:
        raise ValueError(f"{', '.join(map(str, files))} must hold at least one rollout, but got none. Predict first.")
    rollouts = list(shown.values())
    if left_out and next(iter(left_out))[0] == rollouts[-1].problem != rollouts[0].problem:
        rollouts = [rollout for rollout in rollouts if rollout.problem != rollouts[-1].problem]
    return rollouts, _num_rows(files[0]) if len(files) == 1 else len(shown) + len(left_out)


def _num_rows(file: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(file).num_rows)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as source:
        for batch in source.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _methods(file: Path) -> dict[str, str]:
    """The methods of a file: the suffix of the columns of each, and its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = f"{file} must be a Parquet file that `grail-lightning predict` wrote, but"
    try:
        columns = pq.read_schema(file).names
    except FileNotFoundError:
        raise ValueError(f"{wanted} got: there is no such file. Correct the path.") from None
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{wanted} got: {' '.join(str(error).split()).rstrip('.')}. Correct the path.") from None
    if missing := [f"`{name}`" for name in _REQUIRED if name not in columns]:
        raise ValueError(f"{wanted} it has no column {', '.join(missing)}. Texts without credit get it by `predict`.")
    first = next((str(row["method"]) for row in _rows(file) if row.get("method")), file.stem)
    return {"": first} | {name[7:]: name[8:] for name in columns if name.startswith("weights.")}


def _unused(name: str, file: Path, names: set[str]) -> str:
    """The name, or another one if a file before has a method of this name."""
    others = (name, f"{name} ({file.stem})", *(f"{name} ({number})" for number in range(2, len(names) + 3)))
    return next(other for other in others if other not in names)

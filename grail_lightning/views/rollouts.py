"""Rollouts with the token credit of one or several methods, read from a Parquet file of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REQUIRED = ("prompt", "response", "correct", "token_ids", "tokens", "token_starts", "token_stops", "weights")
_CREDIT = ("weights", "scores", "fallback")


@dataclass(kw_only=True, slots=True)
class Rollout:
    """A rollout as the page shows it."""

    row: dict[str, Any]  # The columns of the Parquet file.
    # By the name of a method: `weights` and `scores`, as many numbers as there are tokens or None, and `fallback`.
    methods: dict[str, dict[str, Any]]

    @property
    def problem(self) -> tuple[str, ...]:
        """What the rollouts of a group have in common: dataset, prompt and reference."""
        return tuple(str(self.row.get(name) or "") for name in ("dataset", "prompt", "reference"))


def read_rollouts(file: Path, max_rollouts: int) -> tuple[list[Rollout], int]:
    """The first rollouts of a file that `PredictionWriter` wrote, and the number of all rollouts in it.

    The rollouts of one prompt are kept together: the last group is left out if the limit would cut it, unless it is the
    only one.

    Raises:
        ValueError: If it is no Parquet file, lacks a column, or has no rows, or `max_rollouts` is not positive.
    """
    import pyarrow.parquet as pq

    if max_rollouts < 1:
        raise ValueError(f"`max_rollouts` must be at least 1, but got {max_rollouts}.")
    columns = _columns(file)
    rollouts: list[Rollout] = []
    for row in _rows(file):
        methods = {"": str(row.get("method") or file.stem)}
        methods |= {name.removeprefix("weights"): name[8:] for name in columns if name.startswith("weights.")}
        credit = {name: {of: row.get(of + suffix) for of in _CREDIT} for suffix, name in methods.items()}
        rollout = Rollout(row=row, methods=credit)
        if len(rollouts) == max_rollouts:
            if rollout.problem == rollouts[-1].problem != rollouts[0].problem:
                rollouts = [other for other in rollouts if other.problem != rollout.problem]
            break
        rollouts.append(rollout)
    if not rollouts:
        raise ValueError(f"{file} must hold at least one rollout, but got none. Predict first.")
    return rollouts, int(pq.read_metadata(file).num_rows)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as source:
        for batch in source.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _columns(file: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = f"{file} must be a Parquet file that `grail-lightning predict` wrote, but"
    try:
        columns: list[str] = pq.read_schema(file).names
    except FileNotFoundError:
        raise ValueError(f"{wanted} got: there is no such file. Correct the path.") from None
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{wanted} got: {' '.join(str(error).split()).rstrip('.')}. Correct the path.") from None
    if missing := [f"`{name}`" for name in _REQUIRED if name not in columns]:
        raise ValueError(f"{wanted} it has no column {', '.join(missing)}. Texts without credit get it by `predict`.")
    return columns

"""Sums, maxima and rows over all ranks. Without a process group each is the local value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """How many ranks there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def over_ranks(values: Tensor, op: str) -> Tensor:
    """Elementwise "sum" or "max" of equally shaped tensors."""
    if world_size() == 1:
        return values
    reduced = values.clone()
    torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op.upper()))
    return reduced


def in_step(parts: Sequence[T], filler: T, device: torch.device) -> list[T]:
    """The parts of this rank's work, filled up to as many as the rank with the most has."""
    most = int(over_ranks(torch.tensor(len(parts), device=device), "max"))
    return [*parts, *[filler] * (most - len(parts))]


def sums(values: dict[str, float]) -> dict[str, float]:
    """Sums over all ranks by name, in one collective; ranks may differ in their names."""
    gathered: list[dict[str, float]] = [values]
    if world_size() > 1:
        gathered = [{}] * world_size()
        torch.distributed.all_gather_object(gathered, values)
    names = dict.fromkeys(name for rank in gathered for name in rank)
    return {name: sum(rank.get(name, 0.0) for rank in gathered) for name in sorted(names)}


def means(values: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Means over all ranks by name, from the sum and the count of each, in one collective.

    Ranks may differ in their names; what no rank has counted is left out.
    """
    parts = {name: pair for name, pair in values.items() if pair[1]}
    found = sums({f"{k} {name}": float(pair[k]) for name, pair in parts.items() for k in (0, 1)})
    names = [name.removeprefix("0 ") for name in found if name.startswith("0 ")]
    return {name: found[f"0 {name}"] / found[f"1 {name}"] for name in names}


def all_rows(values: Tensor) -> Tensor:
    """The values of all ranks, one rank after the other; ranks may differ in their number of rows."""
    if world_size() == 1:
        return values
    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, values.detach().cpu())
    return torch.cat(gathered).to(values.device)

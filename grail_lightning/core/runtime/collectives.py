"""Sums, maxima and rows over all ranks. Without a process group the result is the local value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def world_size() -> int:
    """The number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """The number of this rank, from 0."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def all_reduce(values: Tensor, op: str) -> Tensor:
    """Elementwise "sum" or "max" over the ranks of equally shaped tensors."""
    if world_size() == 1:
        return values
    reduced = values.clone()
    torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op.upper()))
    return reduced


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor without a graph; one that FSDP2 has sharded is gathered from all ranks, which is a collective."""
    from torch.distributed.tensor import DTensor

    data = tensor.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def pad_to_longest_rank(parts: Sequence[T], dummy: T, device: torch.device) -> list[T]:
    """This rank's parts, filled up to the number of parts of the rank that has the most."""
    most = int(all_reduce(torch.tensor(len(parts), device=device), "max"))
    return [*parts, *[dummy] * (most - len(parts))]


def all_gather_objects(value: T) -> list[T]:
    """The value of each rank, in one collective. Values must be picklable."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def on_first_rank(make: Callable[[], T]) -> T:
    """What the first rank makes, on every rank; or its error, as a ValueError on the others. A collective."""
    outcome: tuple[T] | str = ""
    failed: Exception | None = None
    if rank() == 0:
        try:
            outcome = (make(),)
        except Exception as error:
            failed, outcome = error, str(error) or type(error).__name__
    outcome = all_gather_objects(outcome)[0]
    if failed is not None and not isinstance(failed, (ValueError, OSError)):
        raise failed  # No user's mistake: with its own traceback.
    if isinstance(outcome, str):
        raise ValueError(outcome)
    return outcome[0]


def sum_by_name(values: Mapping[str, float]) -> dict[str, float]:
    """Sums over all ranks by name, in one collective; ranks may differ in their names."""
    gathered = all_gather_objects(dict(values))
    names = dict.fromkeys(name for rank in gathered for name in rank)
    return {name: sum(rank.get(name, 0.0) for rank in gathered) for name in sorted(names)}


def all_gather_rows(values: Tensor) -> Tensor:
    """The rows of all ranks, in the order of the ranks. Ranks may differ in their number of rows."""
    if world_size() == 1:
        return values
    return torch.cat(all_gather_objects(values.detach().cpu())).to(values.device)

"""Checks of options, and of tensors that user-defined classes return. An error names the first that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["floating-point", "integer", "bool"]


def check_option(name: str, value: Any, allowed: object) -> None:
    """Check an option: a number by an interval such as ``(0, 1]``, a choice by its `Literal`.

    The command line has checked choices already; from Python nothing else does. NaN lies in no interval.
    """
    if not isinstance(allowed, str):
        if value not in get_args(allowed):
            raise ValueError(f"`{name}` must be one of {', '.join(get_args(allowed))}, but got {value!r}.")
        return
    low, high = _ends(allowed)
    ends = (allowed[0] == "[" and value == low) or (allowed[-1] == "]" and value == high)
    if not (low < value < high or ends):
        raise ValueError(f"`{name}` must lie in {allowed}, but got {value}.")


@cache
def _ends(interval: str) -> tuple[float, float]:
    low, high = map(float, interval[1:-1].split(","))
    return low, high


def check_options(owner: object, group: str = "", /, **allowed: object) -> None:
    """Check attributes of `owner` by `check_option`. Messages name an option as `group.name` if `group` is given."""
    for name, kind in allowed.items():
        check_option(f"{group}.{name}" if group else name, getattr(owner, name), kind)


class Claim(NamedTuple):
    """A condition on every entry of a tensor."""

    text: str
    """The condition in words: the error message up to "but got"."""
    broken: Tensor
    """True where the condition does not hold."""
    shown: Tensor
    """A tensor of the same shape, whose value at the first wrong entry is shown in the message."""


def check_tensor(subject: str, tensor: object, kind: Kind, shape: Sequence[int], device: torch.device) -> None:
    """Check that a value is a detached tensor of this kind and shape on this device, without synchronisation.

    `subject` is the beginning of the message of the `ValueError`: who must return what.
    """
    wanted = f"{subject} as {'an' if kind == 'integer' else 'a'} {kind} tensor of shape {list(shape)} on {device}"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{wanted}, but got {type(tensor).__name__}. Make it one with `torch.as_tensor`.")
    if _kind(tensor) != kind or tensor.shape != torch.Size(shape) or tensor.device != device:
        raise ValueError(
            f"{wanted}, but got {str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)} on "
            f"{tensor.device}. Take shape and device from the masks of the batch."
        )
    if tensor.requires_grad:
        raise ValueError(
            f"{wanted}, detached, but got one that requires a gradient. Compute it under `torch.no_grad()`, or call "
            "`.detach()`."
        )


def check_claims(claims: Sequence[Claim], remedy: str) -> None:
    """Check claims in their order, synchronising with the device once; `remedy` is the last sentence of the message."""
    broken = torch.stack([claim.broken.any() for claim in claims]).tolist()
    if not any(broken):
        return
    claim = claims[broken.index(True)]
    place: list[int] = claim.broken.nonzero()[0].tolist()
    where = ", ".join(f"{axis} {index}" for axis, index in zip(("row", "column"), place, strict=False))
    raise ValueError(f"{claim.text}, but got {claim.shown[tuple(place)].item()} in {where}. {remedy}")


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "floating-point" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "integer"

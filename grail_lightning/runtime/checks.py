"""Checks of tensors that user-defined classes return. An error names the first entry that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["floating-point", "integer", "bool"]


class Claim(NamedTuple):
    """A condition on every entry of a tensor.

    Attributes:
        text: The condition in words: the error message up to "but got".
        broken: A bool tensor, True where the condition does not hold.
        shown: A tensor of the same shape, whose value at that entry is shown in the message.
    """

    text: str
    broken: Tensor
    shown: Tensor


def check_tensor(subject: str, tensor: object, kind: Kind, shape: Sequence[int], device: torch.device) -> None:
    """Check that a value is a detached tensor of this kind and shape on this device, without synchronisation.

    Args:
        subject: The beginning of the message: who must return what.
        tensor: The value that was returned.
        kind: The kind of its dtype.
        shape: Its shape.
        device: The device on which it must be.

    Raises:
        ValueError: If it is not.
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
    """Check claims in their order; synchronises with the device once.

    Args:
        claims: The claims that must hold.
        remedy: The last sentence of the message.

    Raises:
        ValueError: For the first claim that does not hold, with its first wrong entry.
    """
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

"""A trial of an optimiser and its schedule on small tensors, before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

# Classes of torch that this package cannot use, with reasons. Lightning's `ReduceLROnPlateau` derives from torch's.
UNUSABLE: dict[type, str] = {
    torch.optim.LBFGS: "`optimizer` must step once for each gradient, but got LBFGS, which evaluates the loss several "
    "times a step. Use AdamW, say.",
    torch.optim.SparseAdam: "`optimizer` must take dense gradients, but got SparseAdam. Use AdamW, say.",
    ReduceLROnPlateau: "`scheduler` must depend on the step alone, but got ReduceLROnPlateau. Use LinearLR, say.",
}


def check_optimizer(make: Callable[[Any], Optimizer], schedule: Callable[[Any], Any] | None = None) -> None:
    """Make the optimiser and its schedule for temporary tensors.

    Args:
        make: A function from parameters to the optimiser.
        schedule: A function from the optimiser to its schedule.

    Raises:
        ValueError: If their options are out of range, or their class cannot be used here.
    """
    optimizer = _made(make)
    _check_usable(optimizer)
    for group in optimizer.param_groups:
        if not math.isfinite(float(group.get("lr", 0.0))):
            raise ValueError(f"`optimizer.lr` must be finite, but got {float(group['lr'])}. Set a number such as 1e-6.")
    if schedule is not None:
        try:
            scheduler = schedule(optimizer)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`scheduler` cannot be made: {_said(error)} Correct its options.") from error
        _check_usable(scheduler)


def _made(make: Callable[[Any], Optimizer]) -> Optimizer:
    """The optimiser of a matrix, or of a matrix and a vector: some accept no vectors, others group by shape."""
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    try:
        return make(iter([matrix, vector]))
    except (TypeError, ValueError):
        try:
            return make(iter([matrix]))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`optimizer` cannot be made: {_said(error)} Correct its options.") from error


def _check_usable(made: object) -> None:
    for unusable, reason in UNUSABLE.items():
        if isinstance(made, unusable):
            raise ValueError(reason)


def _said(error: Exception) -> str:
    return f"{str(error).rstrip('.')}."

"""Parameters that are frozen, or trainable, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def requiring_grad(parameters: list[nn.Parameter], value: bool) -> Iterator[None]:
    """Set `requires_grad` of parameters to `value` inside the context; all must have the opposite value before."""
    for parameter in parameters:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not value)

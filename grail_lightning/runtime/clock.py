"""Seconds of work on a device, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def synchronised_clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PhaseClock:
    """Seconds of each phase of a step. A phase inside another one takes its time from it.

    Args:
        device: That the phases run on.

    Attributes:
        seconds: By phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge what runs inside to a phase."""
        self._charge()
        self._inside.append(name)
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        now = synchronised_clock(self.device)
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

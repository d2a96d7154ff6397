"""Time spent on a device, in seconds, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Seconds of each phase of a step, by name. Time in an inner phase does not count for the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as this phase's."""
        self._charge()
        self._inside.append(name)
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # Its work is asynchronous.
        now = time.perf_counter()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

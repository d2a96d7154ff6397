"""Time spent on a device, in seconds, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """Seconds of each phase of a training step, by name. Time in an inner phase does not count for the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as this phase's."""
        begun, counted = self._now(), sum(self.seconds.values())
        yield
        of_inner_phases = sum(self.seconds.values()) - counted
        self.seconds[name] += self._now() - begun - of_inner_phases

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # Its work is asynchronous.
        return time.perf_counter()

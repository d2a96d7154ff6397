"""Time spent on a device, in seconds, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class _Span(NamedTuple):
    """One passage through a phase, between two moments: seconds, or events of CUDA."""

    name: str
    begin: Any
    end: Any
    first_inner: int  # The number of the first span that ended inside of it; all later ones before it did, too.


class PhaseClock:
    """Seconds of each phase of a training step, by name. Time in an inner phase does not count for the outer one.

    On CUDA, whose work is asynchronous, the moments are events in the device's queue: a phase has the time of its
    kernels, and the host does not wait before `seconds` are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[_Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context as this phase's."""
        begin, first_inner = self._now(), len(self._spans)
        yield
        self._spans.append(_Span(name, begin, self._now(), first_inner))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by phase so far; on CUDA the host waits for the device."""
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize(self.device)
        own: list[float] = []
        seconds: dict[str, float] = {}
        for span in self._spans:
            whole = span.begin.elapsed_time(span.end) / 1000 if on_cuda else span.end - span.begin
            own.append(whole - sum(own[span.first_inner :]))
            seconds[span.name] = seconds.get(span.name, 0.0) + own[-1]
        return seconds

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here.
        event.record()
        return event

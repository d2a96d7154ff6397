"""How far the training of a method is, and how long it will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from grail_lightning.app.sweep import SweepRun

_EVERY = 2.0  # Seconds between two looks at the runs.


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How many of the runs are finished, which are under way, and the seconds that are left."""

    done: int
    total: int
    running: tuple[str, ...]
    seconds_left: float

    def __str__(self) -> str:
        left = self.seconds_left
        time_left = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} seconds"
        return f"training: {self.done} of {self.total} runs, {time_left} left"


class _Watch:
    """Follows runs by their records. A run that another call has begun waits until this one begins it.

    `seconds` of each run is the time that it is expected to take. These times are scaled by what the runs that have
    finished took, or more if one that is under way has taken longer.
    """

    def __init__(self, runs: Sequence[tuple[SweepRun, float]], jobs: int) -> None:
        self._left = [(run, seconds) for run, seconds in runs if run.record()["state"] != "finished"]
        self._total, self._jobs, self._opened = len(self._left), jobs, time.time()
        self._began = dict[str, float]()
        self._took, self._expected = 0.0, 0.0

    def look(self) -> Progress:
        """How far the runs are now."""
        now, left = time.time(), list[tuple[SweepRun, float]]()
        for run, seconds in self._left:
            state = run.record()["state"]
            if state == "started" and (run.folder / "sweep.json").stat().st_mtime >= self._opened:
                self._began.setdefault(run.folder.name, now)
            if state != "finished":
                left.append((run, seconds))
            elif (began := self._began.pop(run.folder.name, None)) is not None:
                self._took, self._expected = self._took + now - began, self._expected + seconds
        self._left = left
        scale = self._took / self._expected if self._expected else 1.0
        under_way = [
            (now - self._began[run.folder.name]) / seconds for run, seconds in left if run.folder.name in self._began
        ]
        scale = max(scale, *under_way, 0.0)
        # A run that takes longer than expected has a twentieth of it left.
        rest = [
            max(seconds * scale - (now - self._began.get(run.folder.name, now)), 0.05 * seconds * scale)
            for run, seconds in left
        ]
        return Progress(
            done=self._total - len(left),
            total=self._total,
            running=tuple(run.folder.name for run, _ in left if run.folder.name in self._began),
            seconds_left=max(max(rest, default=0.0), sum(rest) / self._jobs),
        )


@contextmanager
def reporting(
    runs: Sequence[tuple[SweepRun, float]], jobs: int, progress: Callable[[Progress], None]
) -> Iterator[None]:
    """Report how far runs are, of which each has the seconds that it is expected to take, while the block runs."""
    watch, ended = _Watch(runs, jobs), threading.Event()

    def look() -> None:
        while not ended.wait(_EVERY):
            try:
                now = watch.look()
            except OSError:  # A run's folder is being removed, to begin it anew.
                continue
            progress(now)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress(watch.look())

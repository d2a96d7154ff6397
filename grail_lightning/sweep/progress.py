"""What a sweep prints: one line for each change, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from statistics import fmean

from grail_lightning.sweep.grid import Run
from grail_lightning.sweep.records import LOG, Record

Group = tuple[str, str]


class Progress:
    """Prints the changes of a sweep.

    Args:
        places: The number of runs at once.
        say: Prints a line.
    """

    def __init__(self, places: int, say: Callable[[str], None]) -> None:
        self._places, self._say = places, say
        self._seconds: dict[Group, list[float]] = {}
        self._ended, self._total = 0, 0

    def begin(self, finished: Sequence[tuple[Run, Record]], waiting: int) -> None:
        """Take over what earlier calls have done."""
        self._ended, self._total = len(finished), len(finished) + waiting
        for run, record in finished:
            self._seconds.setdefault(run.group, []).append(record.seconds)

    def started(self, run: Run, record: Record) -> None:
        """A run has been started."""
        again = f", attempt {record.attempts}" if record.attempts > 1 else ""
        self._line(f"{run.title}: started{again}")

    def ended(self, run: Run, record: Record, left: float | None) -> None:
        """A run has come to an end, its own or by a signal.

        Args:
            run: The run.
            record: Its record.
            left: The seconds until all runs will have ended; None if nothing is known of that.
        """
        if record.state == "finished":
            self._seconds.setdefault(run.group, []).append(record.seconds)
            how = f"finished in {duration(record.seconds)}"
            how += f", held-out accuracy {record.outcome}" if record.outcome else ""
        else:
            how = f"failed, see {run.folder / LOG}" if record.state == "failed" else "interrupted"
        self._ended += record.state != "interrupted"
        self._line(f"{run.title}: {how}", left)

    def elsewhere(self, run: Run, record: Record) -> None:
        """A run has ended in another call of the sweep."""
        self._ended += 1
        self._line(f"{run.title}: {record.state} in another call")

    def note(self, text: str) -> None:
        """Something else has happened."""
        self._line(text)

    def left(self, waiting: Iterable[Group], running: Iterable[tuple[Group, float]]) -> float | None:
        """The seconds until all runs will have ended, from the mean of those of the same method and task.

        Args:
            waiting: The method and task of each run that is not started.
            running: The same of each that runs, with the seconds since its start.
        """
        if not self._seconds:
            return None
        overall = fmean(seconds for found in self._seconds.values() for seconds in found)
        means = {group: fmean(found) for group, found in self._seconds.items()}
        rest = [max(0.0, means.get(group, overall) - since) for group, since in running]
        return max([sum(rest, sum(means.get(group, overall) for group in waiting)) / self._places, *rest])

    def _line(self, text: str, left: float | None = None) -> None:
        remaining = f"; about {duration(left)} left" if left else ""
        self._say(f"{datetime.now():%H:%M:%S}  [{self._ended}/{self._total}] {text}{remaining}")


def duration(seconds: float) -> str:
    """Seconds in words: `46 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"

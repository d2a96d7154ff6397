"""Is the model's answer the reference answer? Grading in batches, safe with any text."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.judge import Outcome, judge
from grail_lightning.answers.pool import WorkerPool
from grail_lightning.answers.records import Verdict

_CACHED_CHARACTERS = 512
_FAULT = (
    "The verifier has a bug: %s, with the reference %.200r and the answer %.200r. The answer counts as not correct, "
    "with the status `crashed`. Please report the pair."
)
_log = logging.getLogger(__name__)


class Verifier:
    """Compares bare answers with references: cheap layers here, the others in worker processes that can be killed.

    A context manager; workers start with the first pair that needs one. Safe to call from any thread and in any
    process, forked or daemonic. Whatever the strings are, `grade` returns a verdict for each. An exception inside a
    layer is a bug of this package: its pair is `crashed`, `faults` counts it, and the first such pair is logged.

    Args:
        num_workers: worker processes at most; None for the usable cores, eight at most.
        timeout_seconds: seconds for one pair in a worker; then it counts as wrong (`timeout`).
        memory_gib: limit of each worker's address space, in GiB.
        cache_size: verdicts kept for pairs that come again (a group asks one question many times).
        conventions: what counts as equal where people differ; None for the defaults.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        timeout_seconds: float = 5.0,
        memory_gib: float = 2.0,
        cache_size: int = 1 << 16,
        conventions: Conventions | None = None,
    ) -> None:
        if num_workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            num_workers = min(8, cores)
        if num_workers < 1:
            raise ValueError(f"`num_workers` must be 1 or more, but got {num_workers}. Leave it out for one a core.")
        if not timeout_seconds > 0:
            raise ValueError(f"`timeout_seconds` must be above 0, but got {timeout_seconds}. Try 5.")
        self.cache_size = cache_size
        self.conventions = conventions or Conventions()
        self._settings = (num_workers, timeout_seconds, memory_gib, cache_size, self.conventions)
        self._pool = WorkerPool(num_workers, timeout_seconds, int(memory_gib * 2**30))
        self._cache: dict[tuple[str, str], Outcome] = {}
        self._cache_lock = threading.Lock()
        self._pid = os.getpid()
        self.faults: Counter[str] = Counter()

    def grade(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict a pair, in order.

        Args:
            pairs: (gold, prediction), both bare answers: the content of the last box, not the whole response.
        """
        for gold, prediction in pairs:
            if not isinstance(gold, str) or not isinstance(prediction, str):
                raise ValueError(
                    f"`pairs` must hold (gold, prediction) as two strings, but got ({gold!r}, {prediction!r}). "
                    "A response without an answer is `Verdict.missing(gold)`."
                )
        if self._pid != os.getpid():  # a fork: its copy of the lock may be held by a thread that does not exist here
            self._cache_lock, self._pid = threading.Lock(), os.getpid()
        outcomes: dict[tuple[str, str], Outcome] = {}
        waiting = []
        for pair in dict.fromkeys((gold, prediction) for gold, prediction in pairs):
            outcome = self._cache.get(pair) or judge(*pair, self.conventions)
            if outcome is None:
                waiting.append(pair)
            else:
                outcomes[pair] = outcome
        if waiting:
            outcomes |= zip(waiting, self._pool.run(waiting, asdict(self.conventions)), strict=True)
        self._keep(outcomes)
        return [
            Verdict(correct=status == "right", status=status, layer=layer, gold=gold, prediction=prediction)
            for (gold, prediction), (status, layer, _) in ((pair, outcomes[pair[0], pair[1]]) for pair in pairs)
        ]

    def _keep(self, outcomes: dict[tuple[str, str], Outcome]) -> None:
        with self._cache_lock:
            for pair, outcome in outcomes.items():
                if outcome.fault:
                    self.faults[outcome.fault] += 1
                    if self.faults[outcome.fault] == 1:
                        _log.warning(_FAULT, outcome.fault, *pair)
                # A crash may be the machine's: another try is cheap.
                elif outcome.status != "crashed" and len(pair[0]) + len(pair[1]) <= _CACHED_CHARACTERS:
                    self._cache[pair] = outcome
            while len(self._cache) > self.cache_size:
                del self._cache[next(iter(self._cache))]

    def close(self) -> None:
        """End the workers; grading again starts new ones."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._settings

"""Heartbeats of the ranks of a run: a rank that has ended is noticed by the others, whatever they wait for.

A process that is killed says nothing. The others wait for it in their next collective: for as long as the time-out of
the process group (half an hour), or until the operating system reports a broken connection. Here each rank counts its
heartbeats in the store through which the ranks found each other, and reads the count of the next rank.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

_BEATS = 20  # In the time without a heartbeat after which a rank counts as ended.
_REASON = "reason"
_CONNECTION = re.compile(r"gloo|nccl|Connection (?:closed|reset|refused)|Broken pipe", re.IGNORECASE)


def connection_lost(error: BaseException) -> bool:
    """Whether an error is that of a collective that another process has left."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None
    )


class Heartbeat:
    """A thread that counts this rank's heartbeats, and watches those of the next rank.

    Args:
        store: A store that all ranks share, and that no other thread of this process uses.
        rank: The index of this process.
        ranks: The number of processes.
        patience_seconds: The time without a heartbeat after which a rank, or the store, counts as ended.
        lost: A function that is called in the thread, with the reason, when a rank has ended.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        patience_seconds: float,
        lost: Callable[[str], None],
    ) -> None:
        self._store, self._rank, self._ranks, self._lost = store, rank, ranks, lost
        self.patience, self.interval = patience_seconds, patience_seconds / _BEATS
        store.set_timeout(timedelta(seconds=patience_seconds))
        self._over, self._asked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._store.set(f"host/{self._rank}", socket.gethostname())
        self._store.add(f"beat/{self._rank}", 1)  # One that stops before its thread's first beat is missed, too.
        self._thread.start()

    def stop(self, reason: str | None = None) -> None:
        """End the thread. The other ranks then expect no more heartbeats, or end for the reason that is given."""
        self._over.set()
        with suppress(RuntimeError):  # The store has ended, too.
            if reason is not None:
                self._store.compare_set(_REASON, "", reason)  # The first reason is the cause of the others.
            self._store.add(f"done/{self._rank}", 1)

    def cause(self) -> str:
        """The reason why a collective has failed, as far as it is known after a few intervals; `lost` is not called."""
        self._asked.set()  # The heartbeats go on, so that other ranks find out who is missing.
        try:
            before = [self._count("beat", rank) for rank in range(self._ranks)]
            end = time.monotonic() + 4 * self.interval
            while time.monotonic() < end:
                if (reason := self._reason()) is not None:
                    return reason
                time.sleep(self.interval)
            silent = [
                rank
                for rank in range(self._ranks)
                if rank != self._rank and self._count("beat", rank) == before[rank] and not self._count("done", rank)
            ]
            if silent:
                return f"{self._named(silent[0])} has ended"
        except RuntimeError:
            return f"rank 0 at {os.environ.get('MASTER_ADDR')}, or what has started it, has ended"
        return "the process of another rank has ended"

    def _run(self) -> None:
        watched = (self._rank + 1) % self._ranks
        counted, changed = 0, time.monotonic()
        reached = changed
        while not self._over.wait(self.interval):
            now = time.monotonic()
            try:
                self._store.add(f"beat/{self._rank}", 1)
                reason, count = self._reason(), self._count("beat", watched)
                # A rank that has not begun may still read its data.
                if count != counted or count == 0 or self._count("done", watched):
                    counted, changed = count, now
                elif reason is None and now - changed > self.patience:
                    reason = f"{self._named(watched)} has given no sign of life for {self.patience:g} seconds"
                    self._store.compare_set(_REASON, "", reason)
                reached = now
            except RuntimeError as error:
                lost = now - reached > self.patience
                reason = f"the process that holds the store of the run cannot be reached ({error})" if lost else None
            if reason is not None and not self._over.is_set() and not self._asked.is_set():
                self._lost(reason)
                return

    def _count(self, what: str, rank: int) -> int:
        return int(self._store.add(f"{what}/{rank}", 0))

    def _reason(self) -> str | None:
        return self._store.get(_REASON).decode() if self._store.check([_REASON]) else None

    def _named(self, rank: int) -> str:
        key = f"host/{rank}"
        return f"rank {rank}" + (f" on {self._store.get(key).decode()}" if self._store.check([key]) else "")

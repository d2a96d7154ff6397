"""The callback that ends a run of several ranks when one of them has ended."""

from __future__ import annotations

import itertools
import os
import sys
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from grail_lightning.runtime.collectives import world_size
from grail_lightning.runtime.heartbeat import Heartbeat, connection_lost

_RUNS = itertools.count()  # A process may fit, and then test: ranks that have finished one may end in the next.
_GO_ON = "Go on from the last checkpoint: the same command with `--ckpt_path=last`."


class Watchdog(Callback):
    """Ends all ranks, with the reason in one line and exit code 1, when one of them has ended or does not answer.

    Without it the others wait in their next collective, for up to half an hour. Each rank counts heartbeats in the
    store of the process group, in a thread, and reads those of the next rank. A run of one process has no watchdog.

    Args:
        patience_seconds: The time without a heartbeat after which a rank counts as ended; 0 switches the watchdog off.

    Raises:
        ValueError: If `patience_seconds` is negative.
    """

    def __init__(self, patience_seconds: float = 40.0) -> None:
        if not patience_seconds >= 0:
            raise ValueError(f"`patience_seconds` must be 0 (off) or positive, but got {patience_seconds}.")
        self.patience_seconds = patience_seconds
        self._heartbeat: Heartbeat | None = None
        self._rank = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin, before the model is loaded."""
        self._stop()
        if self.patience_seconds and world_size() > 1:
            self._rank = trainer.global_rank
            # A client of its own: the ranks' common one is blocked while it waits for another rank.
            client = _get_default_store().clone()  # type: ignore[attr-defined]
            store = PrefixStore(f"grail/{next(_RUNS)}", client)
            self._heartbeat = Heartbeat(store, self._rank, world_size(), self.patience_seconds, self._end)
            self._heartbeat.start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the thread; other ranks may still be at work."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks of an error of this one, or add to the error of a collective what has ended."""
        if self._heartbeat is None:
            return
        if connection_lost(exception):
            exception.add_note(f"{_sentence(self._heartbeat.cause())} {_GO_ON}")
            self._stop()
        elif isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._stop()
        else:
            said = (str(exception).splitlines() or [""])[0][:300]
            self._stop(f"rank {self._rank} has ended with {type(exception).__name__}: {said}")

    def _stop(self, reason: str | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop(reason)
        self._heartbeat = None

    def _end(self, reason: str) -> NoReturn:
        """End the process from the thread: the main thread may be in a collective that nothing else can end."""
        print(f"grail-lightning: error: {_sentence(reason)} {_GO_ON}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


def lost_rank(error: BaseException) -> str | None:
    """What `Watchdog` has found out about the error of a collective, in one line; None for another error."""
    notes = [note for note in getattr(error, "__notes__", []) if note.endswith(_GO_ON)]
    return notes[0] if notes and connection_lost(error) else None


def _sentence(reason: str) -> str:
    text = reason.rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."

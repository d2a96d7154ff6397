"""The callback that ends a run of several ranks when one of them has ended."""

from __future__ import annotations

import itertools
import os
import sys
import threading
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
    store of the process group, in a thread, and reads those of the next rank. Before the ranks have met there is no
    store; a rank that waits too long for the others ends. A run of one process has no watchdog.

    Args:
        patience_seconds: The time without a heartbeat after which a rank counts as ended; 0 switches the watchdog off.
        meeting_seconds: The time in which all ranks must have started, from the moment in which this one is ready to
            meet them; 0 leaves the time-out of torch, half an hour.

    Raises:
        ValueError: If a time is negative.
    """

    def __init__(self, patience_seconds: float = 40.0, meeting_seconds: float = 300.0) -> None:
        for name, seconds in (("patience_seconds", patience_seconds), ("meeting_seconds", meeting_seconds)):
            if not seconds >= 0:
                raise ValueError(f"`{name}` must be 0 (off) or positive, but got {seconds}.")
        self.patience_seconds, self.meeting_seconds = patience_seconds, meeting_seconds
        self._heartbeat: Heartbeat | None = None
        self._meeting: threading.Timer | None = None
        self._rank = 0

    def before_meeting(self, trainer: Trainer) -> None:
        """Begin to wait for the other ranks, of which there are `world_size` less one. `setup` follows the meeting."""
        if not self.meeting_seconds or trainer.world_size < 2:
            return
        reason = (
            f"Rank {trainer.global_rank} has waited {self.meeting_seconds:g} s for all {trainer.world_size} ranks to "
            "start, and some have not. Look at what they have printed, and start all of them again. "
            "`--watchdog.meeting_seconds` sets the time."
        )
        self._meeting = threading.Timer(self.meeting_seconds, _exit, [reason])
        self._meeting.daemon = True
        self._meeting.start()

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
            self._stop()
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
        if self._meeting is not None:
            self._meeting.cancel()
            self._meeting = None
        if self._heartbeat is not None:
            self._heartbeat.stop(reason)
        self._heartbeat = None

    def _end(self, reason: str) -> NoReturn:
        """End the process from the thread: the main thread may be in a collective that nothing else can end."""
        _exit(f"{_sentence(reason)} {_GO_ON}")


def _exit(line: str) -> NoReturn:
    print(f"grail-lightning: error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def lost_rank(error: BaseException) -> str | None:
    """What `Watchdog` has found out about the error of a collective, in one line; None for another error."""
    notes = [note for note in getattr(error, "__notes__", []) if note.endswith(_GO_ON)]
    return notes[0] if notes and connection_lost(error) else None


def _sentence(reason: str) -> str:
    text = reason.rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."

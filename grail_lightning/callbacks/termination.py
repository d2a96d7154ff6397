"""Handling of SIGTERM, the signal that clusters (SLURM, Kubernetes) send to a job before they kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import NoReturn

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning.runtime.collectives import all_reduce

_NOTED = b"\nSIGTERM: the run saves and ends when this batch of rollouts, or this validation, is done.\n"


class Termination:
    """A handler of SIGTERM: in training it only records the signal, elsewhere it ends the process at once.

    In training all ranks must end at the same point, so the signal is acted upon later. The handler replaces
    Lightning's, which starts a collective at whatever point the signal arrives, and after which the exit code is 0.
    Lightning's handler of the signal for a requeue (SLURM) stays.

    The exit code is 143, that of a process that the signal has ended. All processes of a node except the first one
    exit with 0, because Lightning kills the first process during its cleanup if a process that it has started fails
    earlier.
    """

    def __init__(self) -> None:
        self._noting = self._noted = False
        self._first, self._code = True, 143

    def watch(self, trainer: Trainer, *, noting: bool) -> None:
        """Install the handler. It records the signal if `noting`, and otherwise ends the process at once."""
        self._noting = noting
        self._first, self._code = trainer.is_global_zero, 0 if trainer.local_rank else 143
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if not self._noting:
            self.end()
        if self._first and not self._noted:
            with contextlib.suppress(OSError):
                os.write(2, _NOTED)  # A logger might be in the middle of a line.
        self._noted = True

    def noted(self, device: torch.device) -> bool:
        """Whether any rank has received the signal. A collective."""
        return bool(all_reduce(torch.tensor(int(self._noted), device=device), "max"))

    def end(self) -> NoReturn:
        """Raise the exception with which Lightning cleans up and leaves the trainer."""
        raise SIGTERMException(self._code)

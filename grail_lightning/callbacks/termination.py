"""SIGTERM: how clusters (SLURM, Kubernetes) end a job before they kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning.runtime.collectives import all_reduce

NOTED = b"\nSIGTERM: the run saves and ends when this batch of rollouts, or this validation, is done.\n"


class Termination:
    """Notes a SIGTERM while the run trains, for a rank may end only where all do; else it ends the process at once.

    It takes the place of Lightning's handler, in which ranks send each other messages wherever they are, and after
    which the exit code is 0. Lightning's handler of the signal for a requeue (SLURM) stays.

    The exit code is that of a process that the signal ended, 143. Processes of a node other than the first have 0:
    Lightning kills the first, while it still cleans up, if one that it has started fails before it.
    """

    def __init__(self) -> None:
        self._noting = self._noted = False
        self._first, self._code = True, 143

    def watch(self, trainer: Trainer, *, noting: bool) -> None:
        """Take the signal over from here on, either to note it or to end at once."""
        self._noting = noting
        self._first, self._code = trainer.is_global_zero, 0 if trainer.local_rank else 143
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum: int, frame: Any) -> None:
        if not self._noting:
            self.end()
        if self._first and not self._noted:
            with contextlib.suppress(OSError):
                os.write(2, NOTED)  # A logger might be in the middle of a line.
        self._noted = True

    def noted(self, device: torch.device) -> bool:
        """Whether any rank has had the signal. A collective."""
        return bool(all_reduce(torch.tensor(int(self._noted), device=device), "max"))

    def end(self) -> NoReturn:
        """Leave the trainer, through what cleans up after it."""
        raise SIGTERMException(self._code)

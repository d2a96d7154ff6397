"""One attempt at a run: a process of ``grail-lightning fit``."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from grail_lightning.sweep.plan import Planned
from grail_lightning.sweep.records import LOG, Claim, Record, make_ready, read_log, read_record, write_record

LAUNCH = Path(__file__).with_name("launch.py")
TERMINATED = 143


class Job:
    """A process that trains a run until it is finished, fails or is interrupted.

    Args:
        plan: The run.
        claim: The claim of the run, which the process inherits and which is released when it has ended.
        environment: Variables of its environment beside those of this process.

    Attributes:
        run: The run.
        record: Its record as of its start.
        started: The time of its start, by the monotonic clock.

    Raises:
        ValueError: If a process that an earlier sweep has left is still at work in the run's folder.
    """

    def __init__(self, plan: Planned, claim: Claim, environment: Mapping[str, str]) -> None:
        self.plan, self._claim = plan, claim
        self.run = plan.run
        resumed = make_ready(self.run)
        before = read_record(self.run)
        self.record = replace(before, state="interrupted", attempts=before.attempts + 1, error="", outcome="")
        write_record(self.run, self.record)
        last = ["--ckpt_path=last"] if resumed else []
        command = [sys.executable, "-m", "grail_lightning", "fit", *plan.arguments, *last]
        with (self.run.folder / LOG).open("ab") as log:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            log.write(f"--- {now}, attempt {self.record.attempts}: {shlex.join(command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self.started = time.monotonic()
            self._process = subprocess.Popen(  # noqa: S603  (our own command, without a shell)
                [sys.executable, "-I", str(LAUNCH), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_inherited(), **environment},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks its runs to end.
                pass_fds=(claim.descriptor,),
            )

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    def ended(self) -> Record | None:
        """The run's record after the process has ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        outcome, error = read_log(self.run, self._log_start)
        record = replace(self.record, seconds=round(self.record.seconds + self.seconds, 1))
        if code == 0:
            record = replace(record, state="finished", outcome=outcome)
        elif code not in (TERMINATED, -signal.SIGTERM):
            if code < 0:
                hint = ", as the system does when memory is used up" if code == -signal.SIGKILL else ""
                error = f"ended by {signal.Signals(-code).name}{hint}"
            record = replace(record, state="failed", error=error or f"exit code {code}")
        write_record(self.run, record)
        self._claim.release()
        return record

    def interrupt(self) -> None:
        """Ask the run to save after its batch and to end."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End the run's processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _inherited() -> dict[str, str]:
    """The environment of this process, without what belongs to it alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    if "SLURM_NTASKS" in environment:
        environment["SLURM_JOB_NAME"] = "bash"  # Lightning then starts the run's ranks by itself.
    return environment

"""Command lines in forks of this process, which has imported everything: a start takes two seconds, not ten.

This module belongs to kill_and_resume.py and kill_evaluation.py and is not run by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["PYTHONPATH"] = sys.path[0]  # For the rank that Lightning starts.

import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (so that each run has it)

import grail_lightning.__main__
from grail_lightning.cli import main as main_of_the_command_line

PROGRAM = Path(grail_lightning.__main__.__file__)
WAIT = 20.0


@dataclass
class Run:
    """A forked process with the needed part of the interface of `subprocess.Popen`."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self) -> None:
        """Until it has ended."""
        while self.poll() is None:
            time.sleep(0.01)


def forked(folder: Path, arguments: list[str], output: str = os.devnull, temporary: Path | None = None) -> Run:
    """A command line in a process group of its own.

    Args:
        folder: Where it runs, and writes to `stderr.txt`.
        arguments: Those of `grail-lightning`.
        output: The file for what it prints.
        temporary: Its folder for temporary files; None for that of this process.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            with open(output, "wb") as said, open("stderr.txt", "wb") as errors:
                os.dup2(said.fileno(), 1)
                os.dup2(errors.fileno(), 2)
            if temporary is not None:
                os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
            sys.argv = [str(PROGRAM), *arguments]
            main_of_the_command_line()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Run(pid)


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgid = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(pgid) == group and state != "Z":
            found.append(int(entry.name))
    return sorted(found)


def all_gone(group: int) -> tuple[float, int]:
    """Seconds until no process of a group was left, and how many were after `WAIT`; those are killed."""
    start = time.monotonic()
    while (left := members(group)) and time.monotonic() - start < WAIT:
        time.sleep(0.05)
    if left:
        os.killpg(group, signal.SIGKILL)
    return time.monotonic() - start, len(left)

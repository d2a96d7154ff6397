"""What a sweep knows of its runs: a file in each run's folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from grail_lightning.cli.commands import DEBUG_HINT, MISTAKE
from grail_lightning.runtime.folder_lock import LOCK, held
from grail_lightning.runtime.run_folder import MARKER, mark_if_new
from grail_lightning.sweep.grid import Run

RECORD, LOG, CLAIMS = "sweep.json", "fit.log", ".sweep"
State = Literal["waiting", "interrupted", "failed", "finished"]
OUTCOME = "held-out accuracy: "
# The last line of a traceback, or that of a user's mistake.
_ERROR = re.compile(r"^(?:[\w.]+: error: |(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b)")
_TAIL_BYTES, _LONGEST = 65_536, 200


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of a run.

    Attributes:
        state: `waiting` before its first attempt; `interrupted` from the beginning of an attempt until its end.
        seconds: Seconds of its attempts that came to an end while their sweep watched.
        attempts: The number of times that it was started.
        error: The last line of its error, or the beginning of that line; "" without one.
        outcome: The line with the run's outcome; "" without one.
    """

    state: State = "waiting"
    seconds: float = 0.0
    attempts: int = 0
    error: str = ""
    outcome: str = ""


def read_record(run: Run) -> Record:
    """The record of a run."""
    try:
        content = json.loads((run.folder / RECORD).read_text())
    except FileNotFoundError:
        return Record()
    return Record(**{field.name: content[field.name] for field in fields(Record)})


def write_record(run: Run, record: Record) -> None:
    """Write the record, whole or not at all, with what a report needs to know of the run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {"method": run.method, "task": run.task, "seed": run.seed}
    if run.point:
        known["point"] = dict(run.point)
    if run.choosing:
        known["choosing"] = True
    part = run.folder / f"{RECORD}.part"
    with part.open("w") as file:
        json.dump(known | asdict(record), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(run.folder / RECORD)


class Claim:
    """A run that this process alone may start. It is released when the process, and those it handed it to, have ended.

    Args:
        run: The run.

    Raises:
        ValueError: If another process has the run.
    """

    def __init__(self, run: Run) -> None:
        self._held = ExitStack()
        self.descriptor = self._held.enter_context(held(_claim_folder(run)))

    def release(self) -> None:
        """Let others have it."""
        self._held.close()


def is_claimed(run: Run) -> bool:
    """Whether a process has the run now."""
    if not (_claim_folder(run) / LOCK).exists():
        return False
    try:
        Claim(run).release()
    except ValueError:
        return True
    return False


def make_ready(run: Run) -> bool:
    """Prepare the folder of a claimed run, and tell whether there is a checkpoint to go on from.

    What an attempt without a checkpoint has left is removed, since the next one begins anew.

    Raises:
        ValueError: If a process is still at work in the folder.
    """
    with held(run.folder):
        mark_if_new(run.folder)
        if (run.folder / "checkpoints" / "last.ckpt").exists():
            return True
        if (run.folder / MARKER).exists() and (run.folder / RECORD).exists():
            for entry in run.folder.iterdir():
                if entry.name in (MARKER, RECORD, LOG, LOCK):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        return False


def read_log(run: Run, start: int) -> tuple[str, str]:
    """The outcome and the last line of an error in the log from this byte on, each "" if there is none."""
    try:
        with (run.folder / LOG).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return "", f"{run.folder / LOG} has been removed"
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]  # A bar rewrites its line with \r.
    outcome = next((line for line in reversed(lines) if line.startswith(OUTCOME)), "")
    error = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else "")
    return outcome.removeprefix(OUTCOME), _shortened(error.removeprefix(MISTAKE).removesuffix(DEBUG_HINT))


def _shortened(text: str) -> str:
    """The first sentences or words of a text that is too long; the log has all of it."""
    text = text.strip()
    if len(text) <= _LONGEST:
        return text
    start = text[: _LONGEST - 1]
    sentences, space, _ = start.rpartition(". ")
    if space:
        return f"{sentences}. …"
    words, space, _ = start.rpartition(" ")
    return f"{words} …" if space else f"{start}…"


def _claim_folder(run: Run) -> Path:
    return run.folder.parent / CLAIMS / run.name

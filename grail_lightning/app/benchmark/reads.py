"""What a credit method reads beside policy and rollouts: labels of steps, environments' scores, reference answers.

Tasks and environments raise audit events (`sys.audit`) where they label a step or score a turn, and `read_arrays` where
it reads labels. Prompts, verdicts and turns that raise them when they are asked are made here. An audit hook cannot be
removed. While a method runs, the files of the benchmark cannot be opened: the hook raises, also in forks of the
process.

This finds what a method does openly. It is no sandbox: code that changes the benchmark itself is not found.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from grail_lightning.answers.records import Verdict
from grail_lightning.app.benchmark.worlds import DATA
from grail_lightning.core.records.episode import Turn
from grail_lightning.core.records.task import Prompt
from grail_lightning.gallery.resampled import find_borders
from grail_lightning.worlds.code.task import ProgramVerdict

LABELS, SCORES, REFERENCES, FILES = "labels", "environment scores", "reference answers", "files of the benchmark"
KINDS = (LABELS, SCORES, REFERENCES, FILES)
"""What is recorded, in the order of results."""
ORACLE = frozenset((LABELS, SCORES, FILES))
"""What makes a method an oracle. Reference answers are in the data of training, as some published methods use them."""
_EVENTS = {
    "grail_lightning.labels": LABELS,
    "grail_lightning.scores": SCORES,
    "grail_lightning.references": REFERENCES,
}
_COLUMNS = frozenset(("answer", "solution", "suggested", "path", "reference", "tempting", "tests", "values"))
"""Columns of the worlds' problems that say what the right answer or a right step is."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
_RUNNING, _SEEN = 0, 1
_memory = mmap.mmap(-1, 16)  # Shared with forks: whether a method runs, and what it has read.

K = TypeVar("K")


@contextmanager
def recording() -> Iterator[list[str]]:
    """A context in which a method runs; behind it, the list holds the `KINDS` that it has read."""
    _install()
    seen: list[str] = []
    _memory[_SEEN : _SEEN + len(KINDS)] = bytes(len(KINDS))
    try:
        with _set(_RUNNING, 1):
            yield seen
    finally:
        seen += [kind for k, kind in enumerate(KINDS) if _memory[_SEEN + k]]


@contextmanager
def unrecorded() -> Iterator[None]:
    """A context of the run's own grading, inside of `recording`."""
    with _set(_RUNNING, 0):
        yield


@contextmanager
def _set(place: int, value: int) -> Iterator[None]:
    before = _memory[place]
    _memory[place] = value
    try:
        yield
    finally:
        _memory[place] = before


# --- the hook ---------------------------------------------------------------------------------------------------------


@cache
def _install() -> None:
    files = {_identity(file) for file in DATA.glob("*.npz")}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not _memory[_RUNNING]:
            return
        if event in _EVENTS:
            if not _within_borders():
                _note(_EVENTS[event])
        elif event == "open" and _identity(arguments[0]) in files:
            _note(FILES)
            raise PermissionError("The files of the benchmark hold labels, which no credit method may read.")
        elif event in _STARTS and any(word in str(arguments) for word in ("app.benchmark", "app/benchmark")):
            _note(FILES)

    sys.addaudithook(hook)


def _within_borders() -> bool:
    """Whether a task is asked where steps end, which `find_borders` returns alone, and not of what kind they are."""
    frame = sys._getframe(2)
    while (back := frame.f_back) is not None:
        if frame.f_code is find_borders.__code__:
            return True
        frame = back
    return False


def _note(kind: str) -> None:
    _memory[_SEEN + KINDS.index(kind)] = 1


def _identity(file: object) -> tuple[int, int] | None:
    """Device and inode, which all names of a file have in common."""
    if not isinstance(file, str | bytes | os.PathLike):
        return None
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


# --- what raises events when it is read -------------------------------------------------------------------------------


def _watched(kind: type[K], name: str, event: str) -> type[K]:
    """A subclass of a record whose field raises an event when it is read, but not when a copy is made of it."""
    slot = vars(kind)[name]

    def read(record: K) -> Any:
        if sys._getframe(1).f_code is not dataclasses.replace.__code__:
            sys.audit(event)
        return slot.__get__(record)

    return type(kind.__name__, (kind,), {"__slots__": (), name: property(read, slot.__set__)})


class _Columns(Mapping[str, Any]):
    """The columns of a problem, of which some raise an event when they are read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Any:
        if name in _COLUMNS:
            sys.audit("grail_lightning.references")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns


_Prompt = _watched(Prompt, "reference", "grail_lightning.references")
_Verdict = _watched(Verdict, "gold", "grail_lightning.references")
_Turn = _watched(Turn, "score", "grail_lightning.scores")


def watched_prompt(prompt: Prompt) -> Prompt:
    """The prompt, which raises an event when its reference, or a column that gives it away, is read."""
    return _copy(_Prompt, prompt, columns=_Columns(prompt.columns))


def watched_verdict(verdict: Verdict) -> Verdict:
    """The verdict, which raises an event when the reference is read."""
    return verdict if isinstance(verdict, ProgramVerdict) else _copy(_Verdict, verdict)


def watched_turn(turn: Turn) -> Turn:
    """The turn, which raises an event when its score is read."""
    return _copy(_Turn, turn)


def _copy(kind: Callable[..., K], record: Any, **changes: Any) -> K:
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return kind(**fields | changes)

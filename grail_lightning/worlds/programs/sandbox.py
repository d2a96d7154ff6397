"""Sandboxes: where one program after the other is run, each in a process of its own that can do no harm."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from grail_lightning.worlds.programs.guest import MAX_DEPTH
from grail_lightning.worlds.programs.outcome import ProgramLimits, Status

_MOST_NESTED = 3 * MAX_DEPTH + 10  # Levels of a reply: a dictionary is a list of pairs in an object.


class EndedError(Exception):
    """A program's process ended, or had to be ended, while its answer was awaited; `certain` as in `ProgramOutcome`."""

    def __init__(self, status: Status, message: str, *, certain: bool = True) -> None:
        super().__init__(message)
        self.status: Status = status
        self.certain = certain


class LostError(Exception):
    """A sandbox was lost for a reason that lies outside of it; nothing is known of the program."""


class StartError(LostError):
    """A sandbox did not start."""


class Sandbox(ABC):
    """A place where one program at a time runs, used by the thread that begins with it.

    A program is given its role and its text by `begin`, and further messages by `ask`, which the guest in
    programs/guest.py answers. A program that does not end as told costs the sandbox what it holds; the next program
    gets another process.

    Attributes:
        limits: Of one program with all of its tests.
        cap: Most bytes of a reply.
        wall_seconds: Most seconds of wall-clock time of a program. On a busy machine processor time takes longer.
    """

    def __init__(self, limits: ProgramLimits) -> None:
        self.limits = limits
        self.cap = (limits.output_kb << 10) + 1024
        self.wall_seconds = 3 * limits.seconds + 1

    @abstractmethod
    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give its role, and what that needs, to a new program; the first reply. It raises what `ask` raises."""

    @abstractmethod
    def ask(self, message: dict[str, Any], more: int = 0) -> dict[str, Any]:
        """Send a message to the program and wait for its reply, which nobody vouches for.

        It may be longer by `more` bytes than `cap`.

        Raises:
            EndedError: The program ended, ran out of time, or said what is no reply.
            LostError: The sandbox did not start, it ended, or the program was killed from outside.
        """

    def end(self) -> None:  # noqa: B027  (there may be nothing to do)
        """Let the program leave, if there is one."""

    def close(self) -> None:  # noqa: B027
        """End all that this sandbox has started. The next program would start it anew."""


def read_reply(text: str | bytes) -> dict[str, Any] | None:
    """The object of an untrusted text in JSON, which what writes or shows it can go through; None if it holds none."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        return None
    level = [reply]
    for _ in range(_MOST_NESTED):
        level = [part for held in level if isinstance(held, (dict, list)) for part in _parts(held)]
    return reply if isinstance(reply, dict) and not level else None


def _parts(held: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held

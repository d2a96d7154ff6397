"""An environment with a Python interpreter."""

from __future__ import annotations

from functools import lru_cache

from grail_lightning.core.environments.side_by_side import restart_clock
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.isolation import Isolation
from grail_lightning.worlds.programs.outcome import ProgramLimits

# All rollouts share its processes.
_executor = lru_cache(maxsize=4)(Executor)


class Python:
    """An environment whose one tool runs a program in a sandbox. It has no reward of its own.

    Each program runs for itself: it has neither the names nor the files of one before.

    Args:
        isolation: How programs are isolated; see `Executor`.
        limits: The limits of one program.
        workers: The number of programs that run side by side, of all rollouts together. The `tool_seconds` of a call
            begin when its program does.
    """

    def __init__(
        self,
        isolation: Isolation | None = None,
        limits: ProgramLimits = ProgramLimits(seconds=1.0),  # noqa: B008  (frozen)
        workers: int = 2,
    ) -> None:
        self._executor = _executor(isolation, limits, workers)

    def reset(self, **row: object) -> None:
        """Begin a rollout; the problem is in the prompt."""

    def run(self, code: str) -> str:
        """Run a Python program.

        Args:
            code: The program, which prints what is asked for.

        Returns:
            What it prints, and the end of its traceback.
        """
        return self._executor.printed(code, restart_clock).rstrip()

"""Calls of a reward function that asks a server, say, and fails now and then: they are made again after a pause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_LONGEST_PAUSE = 60.0


class Attempts:
    """The calls of a function in one batch; each failure is a ValueError of the `guard` around a call.

    After the ``k``-th failure there is a pause of ``pause_seconds · 2^(k − 1)``, at most a minute. The failure after
    `retries` further calls is raised.

    Attributes:
        again: How many calls were made again.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        guard: Callable[[], AbstractContextManager[None]],
        retries: int,
        pause_seconds: float,
    ) -> None:
        self._call, self._guard, self._retries, self._pause_seconds = call, guard, retries, pause_seconds
        self.again = 0

    def begin(self) -> Any:
        """What the function returns: its values, or an awaitable."""
        while True:
            try:
                with self._guard():
                    return self._call()
            except ValueError as error:
                time.sleep(self._pause(error))

    async def wait(self, pending: Any) -> Any:
        """What the awaitable returns, or one of a further call."""
        while True:
            try:
                with self._guard():
                    return await (self._call() if pending is None else pending)
            except ValueError as error:
                await asyncio.sleep(self._pause(error))
            pending = None

    def _pause(self, error: ValueError) -> float:
        if self.again == self._retries:
            raise error
        self.again += 1
        return min(self._pause_seconds * 2.0 ** (self.again - 1), _LONGEST_PAUSE)

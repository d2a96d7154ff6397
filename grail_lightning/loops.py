"""Event loops in threads of their own, since that of a notebook is busy."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import cache


def background_loop(name: str) -> asyncio.AbstractEventLoop:
    """The running event loop of this name. It stays: clients such as `httpx.AsyncClient` belong to their first loop."""
    return _loop(name, os.getpid())


@cache
def _loop(name: str, process: int) -> asyncio.AbstractEventLoop:  # A fork of the process has no thread of its parent.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"{name}-{process}", daemon=True).start()
    return loop

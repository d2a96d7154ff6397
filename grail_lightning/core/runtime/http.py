"""Requests to servers: one POST of JSON, for coroutines and for threads.

A connection goes straight to the address: redirects are not followed, since the key is for this address alone, and the
variables of proxies are not read.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp

MAX_BYTES = 8_000_000  # Of an answer: what comes from outside must not fill the memory.
_CONNECT_SECONDS = 10.0
_REPEATED = (429, 500, 502, 503, 504)
_PAUSE = 0.2  # Seconds; doubled before each further request but the second.
# A machine that has gone is noticed although nothing is sent to it while it computes: after 60 s, then each 15 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class Answer(NamedTuple):
    """A complete answer of a server, whatever its status."""

    status: int
    text: str


class NoAnswer(ConnectionError):  # noqa: N818  (a state of a server, which may be another one later)
    """The server gave no complete answer."""


class SlowAnswer(NoAnswer):
    """It gave none in time."""


class LongAnswer(NoAnswer):
    """Its answer has more bytes than are read."""


async def post(
    url: str, body: object = None, *, seconds: float, key: str | None = None, max_bytes: int = MAX_BYTES
) -> Answer:
    """The answer to one request.

    Args:
        url: The address.
        body: What is sent as JSON; None sends no body.
        seconds: Most seconds of the whole request, of which at most ten until there is a connection.
        key: The bearer token of the address.
        max_bytes: Most bytes of the answer, which are counted after decompression.

    Raises:
        NoAnswer: There is no complete answer: `SlowAnswer` after these seconds, `LongAnswer` after these bytes.
    """
    import aiohttp  # Slow to import, and `--help` is not.

    # Each request has a connection of its own: an idle one may be closed by the server at any moment.
    connector = aiohttp.TCPConnector(force_close=True, socket_factory=_kept_alive)
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session,
            session.post(url, json=body, allow_redirects=False) as answer,
        ):
            return Answer(answer.status, await _text(answer, max_bytes))
    except NoAnswer:
        raise
    except aiohttp.ServerTimeoutError:
        raise NoAnswer("no connection in time") from None
    except TimeoutError:
        raise SlowAnswer(f"no answer within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: what aiohttp says of an address.
        raise NoAnswer(_reason(error)) from None


async def _text(answer: aiohttp.ClientResponse, max_bytes: int) -> str:
    if 300 <= answer.status < 400:
        return f"redirected to {answer.headers.get('Location', 'nowhere')}"
    received = bytearray()
    async for part in answer.content.iter_any():
        received += part
        if len(received) > max_bytes:
            raise LongAnswer(f"an answer of more than {max_bytes:,} bytes")
    return received.decode("utf-8-sig", errors="replace")


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0  # Negative where no machine has this name.
    named = next((text for name in ("strerror", "message") if (text := getattr(error, name, None))), None)
    reason = os.strerror(number) if number > 0 else str(named or error)
    return " ".join(reason.split())[:200] or type(error).__name__


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    connection = socket.socket(*address[:3])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def post_blocking(
    url: str, body: object = None, *, seconds: float, key: str | None = None, max_bytes: int = MAX_BYTES
) -> Answer:
    """`post` for code that is no coroutine, in any thread, whether an event loop runs in it or not.

    Each request has an event loop and a thread of its own. So loops are shared by no threads, and a process that is
    forked inherits none that it uses.
    """
    outcome: Future[Answer] = Future()

    def request() -> None:
        try:
            outcome.set_result(asyncio.run(post(url, body, seconds=seconds, key=key, max_bytes=max_bytes)))
        except BaseException as error:  # It is raised where the result is awaited.
            outcome.set_exception(error)

    threading.Thread(target=request, name="http", daemon=True).start()
    return outcome.result()


def post_json(url: str, body: object, *, seconds: float, retries: int = 0, key: str | None = None) -> Any:
    """The JSON with which a server answers; for code that is no coroutine.

    A request without an answer, or with status 429 or 5xx, is sent again at most `retries` times.

    Raises:
        ValueError: There is no answer that can be read.
    """
    for number in range(retries + 1):
        if number > 1:
            time.sleep(_PAUSE * 2 ** (number - 1))
        try:
            answer = post_blocking(url, body, seconds=seconds, key=key)
        except LongAnswer as error:  # It would be as long the next time.
            raise ValueError(f"{url} gave {error}.") from None
        except NoAnswer as error:
            if number < retries:
                continue
            raise ValueError(f"{url} did not answer ({error}).") from None
        if answer.status not in _REPEATED:
            break
    try:
        if answer.status == 200:
            return json.loads(answer.text)
    except (ValueError, RecursionError):  # The second one from too deep nesting.
        pass
    raise ValueError(f"{url} answered with status {answer.status} and {answer.text[:200]!r}, but not with JSON.")


def check_address(option: str, url: str, example: str) -> None:
    """Check that an option is an HTTP address."""
    try:
        parts = urlsplit(url)
    except ValueError:  # Of brackets that hold no address.
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"`{option}` must be an address such as {example}, but got {url!r}.")

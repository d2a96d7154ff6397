"""A client of one server: JSON over HTTP with a pool of connections, and waiting for a server that went away.

The standard library speaks HTTP here: the clients that dependencies bring along change from version to version.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_CONNECT_SECONDS = 10.0
# A machine that has gone is noticed although nothing is sent to it while it decodes: after 60 s, then each 15 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class ServerGone(ConnectionError):  # noqa: N818  (a state in which one waits, not an error of a caller)
    """The server gave no complete answer: it is starting, restarting, overloaded, or unreachable."""


class ServerRefused(ValueError):  # noqa: N818
    """The server answered that it will not do what was asked, however often it is asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Stopped(Exception):  # noqa: N818
    """The client was closed while a request waited."""


class ServerClient:
    """JSON requests to one server. Its methods may be called by many threads.

    Args:
        url: ``http://HOST:PORT`` or ``https://HOST:PORT``, with a path if a proxy adds one.
        answer_seconds: How long an answer may take; a whole response is one answer.
        api_key: The key of ``vllm serve --api-key``, sent as a bearer token.

    Raises:
        ValueError: If the URL is none.
    """

    def __init__(self, url: str, answer_seconds: float, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            self.port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not self.port or parts.username:
            raise ValueError(f"`urls` must hold addresses such as http://127.0.0.1:8000, but got {url!r}.")
        self.url, self.host = url.rstrip("/"), parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._answer_seconds = answer_seconds
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()

    def call(self, method: str, path: str, body: object = None, seconds: float | None = None) -> Any:
        """The JSON of one answer, or None if it is empty.

        Args:
            method: GET or POST.
            path: The route.
            body: What is sent as JSON.
            seconds: How long the answer may take; default `answer_seconds`.

        Raises:
            ServerGone: If no complete answer came. The request may be sent again.
            ServerRefused: If the server refuses this request.
            Stopped: If `close` was called.
        """
        sent = None if body is None else json.dumps(body).encode()
        connection, used = self._take()
        try:
            try:
                status, answer = self._exchange(connection, method, path, sent, seconds)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not used:
                    raise
                connection.close()  # The server closes idle connections after some seconds; that is no failure.
                status, answer = self._exchange(connection, method, path, sent, seconds)
            self._give_back(connection)
        except (OSError, http.client.HTTPException) as error:
            self._drop(connection)
            if self._closed.is_set():
                raise Stopped from None
            raise ServerGone(_short(error)) from None
        except BaseException:
            self._drop(connection)
            raise
        return _read(status, answer)

    def many(self, path: str, bodies: Sequence[object], at_once: int) -> list[Any]:
        """The answers to many POST requests, in their order, with at most `at_once` in flight.

        Raises:
            ServerGone: If one got no complete answer; the others are given up.
            ServerRefused: If one was refused; the others are given up.
            Stopped: If `close` was called.
        """
        errors: list[BaseException] = []

        def one(body: object) -> Any:
            if errors or self._closed.is_set():
                return None
            try:
                return self.call("POST", path, body)
            except BaseException as error:
                errors.append(error)
                self._interrupt()  # The others' answers are given up: nobody waits for a long one.
                return None

        with ThreadPoolExecutor(max(1, min(at_once, len(bodies)))) as pool:
            answers = list(pool.map(one, bodies))
        if errors:
            raise errors[0]
        if self._closed.is_set():
            raise Stopped
        return answers

    def until_answered(self, ask: Callable[[], T], seconds: float, said: Callable[[str], None] | None = None) -> T:
        """The result of `ask`, which is called again, with pauses that double, while the server is gone.

        Args:
            ask: What calls this client.
            seconds: How long to try.
            said: Called once, with the reason, before the first pause.

        Raises:
            ServerGone: If the server was gone for `seconds`, with the last reason.
        """
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            try:
                return ask()
            except ServerGone as error:
                left = end - time.monotonic()
                if left <= 0:
                    raise
                if said is not None:
                    said(str(error))
                    said = None
            self.pause(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Stopped: If `close` is called meanwhile.
        """
        if self._closed.wait(seconds):
            raise Stopped

    def close(self) -> None:
        """End every request that waits, in whatever thread, and close all connections."""
        self._closed.set()
        self._interrupt()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def reopen(self) -> None:
        """Allow requests again after `close`."""
        self._closed.clear()

    # --- connections ------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        with self._lock:
            waiting = [*self._busy]
        for connection in waiting:
            _shut(connection)

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        if self._closed.is_set():
            raise Stopped
        with self._lock:
            used = bool(self._idle)
            connection = self._idle.pop() if used else self._kind(self.host, self.port, timeout=_CONNECT_SECONDS)
            self._busy.add(connection)
        return connection, used

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        sent: bytes | None,
        seconds: float | None,
    ) -> tuple[int, bytes]:
        if connection.sock is None:
            connection.connect()
            _keep_alive(connection.sock)
        connection.sock.settimeout(self._answer_seconds if seconds is None else seconds)
        connection.request(method, self._path + path, body=sent, headers=self._headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            self._idle.append(connection)
        if self._closed.is_set():
            self.close()

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()


def _read(status: int, answer: bytes) -> Any:
    """The JSON of an answer; an error for other statuses than 2xx."""
    if status in (408, 425, 429) or status in (500, 502, 503, 504):
        raise ServerGone(f"status {status}: {_message(answer)}")
    if not 200 <= status < 300:
        raise ServerRefused(f"status {status}: {_message(answer)}", status)
    if not answer:
        return None
    try:
        return json.loads(answer)
    except ValueError:
        raise ServerGone(f"no JSON: {answer[:80]!r}") from None


def _message(answer: bytes) -> str:
    """The text of an error's answer, on one line; vLLM wraps it in JSON."""
    text = answer.decode(errors="replace")
    try:
        inner = json.loads(text)
        error = inner.get("error", inner) if isinstance(inner, dict) else inner
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    return " ".join(text.split())[:300]


def _short(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _keep_alive(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

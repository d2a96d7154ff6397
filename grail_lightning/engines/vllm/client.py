"""One vLLM server as the engine sees it: JSON over HTTP, its state, its weights, and the completions it gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grail_lightning.engines.vllm.requests import Completion, Request
from grail_lightning.loops import background_loop

T = TypeVar("T")

EXTENSION = "grail_lightning.vllm_worker.WeightReceiver"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_CONTROL_SECONDS = 60.0  # For questions about its state, which a server answers between two steps of decoding.
# A machine that has gone is noticed although nothing is sent to it while it decodes: after 60 s, then each 15 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
# Lightning prints what this logger is told; unlike `rank_zero_info` from every rank, for one rank alone may notice.
LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class ServerGone(ConnectionError):  # noqa: N818  (a state in which one waits, not an error of a caller)
    """The server gave no complete answer: it is starting, restarting, overloaded, or unreachable."""


class ServerRefused(ValueError):  # noqa: N818
    """The server answered that it will not do what was asked, however often it is asked."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The newest weights: a name that no other weights of any run have, and the file in which servers find them."""

    version: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a server, see `grail_lightning.vllm_worker.WeightReceiver`."""

    instance: str  # The processes of its workers; a server that was restarted has others.
    version: str | None  # None before the first push, and if its workers differ.
    dtype: str  # In which it computes.
    error: str | None = None  # The reason for which a worker could not load weights.


class ServerClient:
    """The client of one server.

    A server that is gone is asked again for `patience` seconds. A whole response is one answer, and at most `at_once`
    of them are in flight.
    """

    def __init__(self, url: str, patience: float, answer_seconds: float, at_once: int) -> None:
        parts = urlsplit(url)
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            self.port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not self.port or parts.username:
            raise ValueError(f"`urls` must hold addresses such as http://127.0.0.1:8000, but got {url!r}.")
        self.url, self.host = url.rstrip("/").removesuffix("/v1"), parts.hostname
        self.patience, self.answer_seconds, self.at_once = patience, answer_seconds, at_once
        self.model = "MODEL"
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def command(self) -> str:
        """The command that starts this server."""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self.model} --port {self.port} --dtype auto "
            f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}"
        )

    async def call(self, method: str, path: str, body: object = None, seconds: float | None = None) -> Any:
        """The JSON of one answer, or None if it is empty."""
        import aiohttp  # Slow to import, and `--help` is not.

        # Each request has a connection of its own: an idle one may be closed by the server at any moment.
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=_kept_alive)
        timeout = aiohttp.ClientTimeout(total=seconds or self.answer_seconds, sock_connect=10)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers) as session,
                session.request(method, self.url + path, json=body) as answer,
            ):
                return _read(answer.status, await answer.read())
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, ServerGone):
                raise
            raise ServerGone(_short(error)) from None

    async def until_answered(
        self, ask: Callable[[], Awaitable[T]], seconds: float, tell: Callable[[str], None] | None = None
    ) -> T:
        """The result of `ask`, which is called again, with pauses that double, while the server is gone.

        `tell` is called once, with the reason, before the first pause. After `seconds` the last error is raised.
        """
        clock, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
        end = clock() + seconds
        while True:
            try:
                return await ask()
            except ServerGone as error:
                left = end - clock()
                if left <= 0:
                    raise
                if tell is not None:
                    tell(str(error))
                    tell = None
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`, with the patience that a server gets; a `ValueError` if it stays away."""

        def tell(reason: str) -> None:
            LOG.warning(f"{self.url} does not answer ({reason}). It is asked again for {self.patience:g} s.")

        try:
            return await self.until_answered(ask, self.patience, tell)
        except ServerGone as error:
            raise ValueError(
                f"{self.url} has not answered for {self.patience:g} s ({error}). Start it: {self.command}. Then "
                "repeat your command; training goes on from its last checkpoint with --ckpt_path=last."
            ) from None

    # --- what a server is asked ---------------------------------------------------------------------------------

    async def status(self) -> Status:
        """The state of the server, asked once; it may be gone, or have no worker extension."""
        return await self._workers("grail_status", seconds=_CONTROL_SECONDS)

    async def load(self, weights: Weights) -> None:
        """Give the server these weights; a `ValueError` if it stays away, or cannot take them."""
        status = await self.patiently(lambda: self._workers("grail_load", weights.path, weights.version))
        if status.error:
            raise ValueError(
                f"{self.url} could not take the weights of the policy ({status.error}). Trainer and server must run "
                "as one user outside of separate containers, or `engine.push_folder` must be a folder that both see "
                f"under the same path; and the server must serve the policy's model. Start it again: {self.command}"
            )
        # Room for new keys and values. Earlier ones are not used again in any case: requests have the version as salt.
        await self.patiently(lambda: self.call("POST", "/reset_prefix_cache?reset_running_requests=true"))

    async def complete(self, requests: Sequence[Request], weights: Weights) -> list[Completion]:
        """The completions of prompts, asked once."""
        free = asyncio.Semaphore(self.at_once)

        async def one(request: Request) -> Completion:
            # Keys and values in the prefix cache are told apart by the weights that computed them.
            body = {"prompt": request.prompt, **request.parameters, "return_token_ids": True}
            async with free:
                return _completion(await self.call("POST", "/v1/completions", body | {"cache_salt": weights.version}))

        try:
            return await all_of(one(request) for request in requests)
        except ServerRefused as error:
            raise ValueError(f"{self.url} refused a prompt: {error}") from None

    async def _workers(self, method: str, *arguments: str, seconds: float | None = None) -> Status:
        """The state of the workers after a method of the extension."""
        try:
            answer = await self.call("POST", "/collective_rpc", {"method": method, "args": arguments}, seconds)
        except (ServerRefused, ServerGone) as error:
            if getattr(error, "status", None) in (404, 405) or f"no attribute '{method}'" in str(error):
                raise ValueError(
                    f"{self.url} takes no weights ({error}). It was started without VLLM_SERVER_DEV_MODE=1 or without "
                    f"--worker-extension-cls. Start it again: {self.command}"
                ) from None
            if isinstance(error, ServerGone):
                raise
            advice = "Set the variable VLLM_API_KEY to its key." if error.status in (401, 403) else "Look at its log."
            raise ValueError(f"{self.url} refused `{method}` ({error}). {advice}") from None
        try:
            workers = answer["results"]
            versions = {worker["version"] for worker in workers}
            return Status(
                instance=" ".join(str(worker["instance"]) for worker in workers),
                version=versions.pop() if len(versions) == 1 else None,
                dtype=str(workers[0]["dtype"]),
                error=next((str(worker["error"]) for worker in workers if worker.get("error")), None),
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ServerGone(f"an answer without the workers' state: {str(answer)[:80]}") from None


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that are made side by side. If one fails, the others are given up."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class Calls:
    """Calls that threads wait for, and that any thread can give up."""

    def __init__(self) -> None:
        self._calls: set[Future[Any]] = set()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call."""
        future = asyncio.run_coroutine_threadsafe(call, background_loop("vllm-servers"))
        self._calls.add(future)
        try:
            return future.result()
        finally:
            future.cancel()  # After an interrupt; nothing happens to one that has ended.
            self._calls.discard(future)

    def cancel(self) -> None:
        """Give up all calls: their `run` raises `concurrent.futures.CancelledError`."""
        for future in list(self._calls):
            future.cancel()


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _read(status: int, answer: bytes) -> Any:
    """The JSON of an answer; an error for other statuses than 2xx."""
    if status in (408, 425, 429) or status in (500, 502, 503, 504):
        raise ServerGone(f"status {status}: {_message(answer)}")
    if not 200 <= status < 300:
        raise ServerRefused(f"status {status}: {_message(answer)}", status)
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        raise ServerGone(f"no JSON: {answer[:80]!r}") from None


def _message(answer: bytes) -> str:
    """The text of an error's answer, on one line; vLLM wraps it in JSON."""
    text = answer.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:300]


def _short(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error) or type(error).__name__


def _completion(answer: Any) -> Completion:
    """The ids and log-probabilities of an answer to ``/v1/completions``."""
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(ids) == len(logprobs):
            return Completion([int(token) for token in ids], [float(value) for value in logprobs])
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise ServerGone(f"an answer without token ids and log-probabilities: {str(answer)[:120]}")

"""One vLLM server as the engine sees it: JSON over HTTP, its workers, its weights, and the completions it gives."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import operator
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grail_lightning.core.engines.requests import Completion, Request
from grail_lightning.core.runtime.guard import said
from grail_lightning.core.runtime.http import NoAnswer, SlowAnswer, post

_T = TypeVar("_T")
Workers = list[dict[str, Any]]
"""The state of each worker of a server, see `grail_lightning.core.engines.vllm.worker.WeightReceiver`."""

_STATE = {"instance", "version", "dtype", "max_model_len"}  # Of `WeightReceiver.grail_status`.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
_AT_ONCE = 256  # Responses in flight at one server, for each rank.
_CONTROL_SECONDS = 60.0  # For questions about its state, which a server answers between two steps of decoding.
_MAX_BYTES = 1 << 28  # Of an answer: more than those of a million tokens with their log-probabilities.
# Lightning prints what this logger is told; unlike `rank_zero_info` from every rank, for one rank alone may notice.
LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class ServerGone(ConnectionError):  # noqa: N818  (a state in which one waits, not an error of a caller)
    """The server gave no complete answer: it is starting, restarting, overloaded, or unreachable."""


class _ServerBusy(ServerGone):
    """It will answer the same request later: nothing else that it was asked for is lost."""


class ServerSlow(ServerGone):
    """It gave no answer in time."""


class UselessAnswer(ServerGone):
    """It gave a complete answer that is no response. Something between may have; a server gives the same one again."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The newest weights: a name that no other weights of any run have, and the file in which servers find them."""

    version: str
    path: str

    def are_in(self, workers: Workers) -> bool:
        """Whether all workers have them."""
        return all(worker["version"] == self.version for worker in workers)


class ServerClient:
    """The client of one server, which is asked again for `patience` seconds when it is gone."""

    def __init__(self, url: str, patience: float, answer_seconds: float) -> None:
        try:
            parts = urlsplit(url)
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"`urls` must hold addresses such as http://127.0.0.1:8000, but got {url!r}.")
        self.url, self.host = url.rstrip("/").removesuffix("/v1"), parts.hostname
        self.patience, self.answer_seconds = patience, answer_seconds
        self.model = "MODEL"
        self._key = os.environ.get("VLLM_API_KEY")

    @property
    def command(self) -> str:
        """The command that starts this server."""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self.model} --port {self.port} --dtype auto "
            "--logprobs-mode processed_logprobs "
            "--worker-extension-cls grail_lightning.core.engines.vllm.worker.WeightReceiver"
        )

    async def post(self, path: str, body: object = None, seconds: float | None = None) -> Any:
        """The JSON of one answer, or None if it is empty; a `ValueError` if the server refuses what was asked."""
        limit = seconds or self.answer_seconds
        try:
            status, text = await post(self.url + path, body, seconds=limit, key=self._key, max_bytes=_MAX_BYTES)
        except NoAnswer as error:
            slow = isinstance(error, SlowAnswer) and not seconds
            raise (ServerSlow if slow else ServerGone)(str(error)) from None
        answered = f"status {status}: {' '.join(text.split())[:300]}"
        if status in (408, 425, 429, 503):
            raise _ServerBusy(answered)
        # vLLM answers 500 to a call of a method that its workers lack; to ask again would not help.
        if status >= 500 and "has no attribute" not in text:
            raise ServerGone(answered)
        if not 200 <= status < 300:
            refused = f"{self.url} refused {path} ({answered})."
            if path == "/collective_rpc":
                refused += f" It takes weights if it is started with this command: {self.command}."
            if status in (401, 403):
                refused += " If it has --api-key, set the variable VLLM_API_KEY here."
            raise ValueError(refused)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise UselessAnswer(f"no JSON: {text[:80]!r}") from None

    async def patiently(
        self, ask: Callable[[], Awaitable[_T]], seconds: float | None = None, state: type[ServerGone] = ServerGone
    ) -> _T:
        """The result of `ask`, which is called again while the server is in a state; a `ValueError` after `seconds`."""
        seconds = self.patience if seconds is None else seconds
        clock, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
        end = clock() + seconds
        while True:
            try:
                return await ask()
            except state as error:
                if (seconds_left := end - clock()) <= 0:
                    raise ValueError(
                        f"{self.url} has not answered for {seconds:g} s ({error}). Start it: {self.command}; or let "
                        "the run wait for a server that is loading with `engine.wait_seconds`. Then repeat your "
                        "command; training goes on from its last checkpoint with --ckpt_path=last."
                    ) from None
                if pause == _FIRST_PAUSE:
                    LOG.warning(f"{self.url} does not answer ({error}). It is asked again for {seconds:g} s.")
            await asyncio.sleep(min(pause, seconds_left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def workers(
        self, method: str = "grail_status", *arguments: str, seconds: float = _CONTROL_SECONDS
    ) -> Workers:
        """The state of the workers after a method of the extension, which is called once."""
        answer = await self.post("/collective_rpc", {"method": method, "args": arguments}, seconds)
        workers = answer.get("results") if isinstance(answer, dict) else None
        if not workers or not all(isinstance(worker, dict) and worker.keys() >= _STATE for worker in workers):
            raise ServerGone(f"an answer without the state of workers: {str(answer)[:120]}")
        return list(workers)

    async def load(self, weights: Weights) -> None:
        """Give the server these weights; a `ValueError` if it cannot take them."""
        workers = await self.patiently(
            lambda: self.workers("grail_load", weights.path, weights.version, seconds=self.answer_seconds)
        )
        if error := next((worker["error"] for worker in workers if worker.get("error")), None):
            raise ValueError(
                f"{self.url} could not take the weights of the policy ({error}). Trainer and server must run as one "
                "user outside of separate containers, or `engine.push_folder` must be a folder that both see under "
                f"the same path; and the server must serve the policy's model. Start it again: {self.command}"
            )
        # Room for new keys and values. Earlier ones are not used again in any case: requests have the version as salt.
        await self.patiently(lambda: self.post("/reset_prefix_cache?reset_running_requests=true"))

    async def complete(self, requests: Sequence[Request], weights: Weights) -> list[Completion]:
        """The completions of prompts. Each is asked for once, and again where the server is busy."""
        free = asyncio.Semaphore(_AT_ONCE)

        async def one(request: Request) -> Completion:
            # Keys and values in the prefix cache are told apart by the weights that computed them.
            body = {"prompt": request.prompt, "return_token_ids": True, "cache_salt": weights.version}
            ask = partial(self.post, "/v1/completions", body | request.parameters)
            async with free:
                return _completion(await self.patiently(ask, state=_ServerBusy), request)

        return await all_of(one(request) for request in requests)


async def all_of(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of calls that are made side by side. If one fails, the others are given up."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _completion(answer: Any, request: Request) -> Completion:
    """The ids and log-probabilities of an answer to ``/v1/completions``; NaN for one that is null.

    Raises:
        ServerGone: If it was cut off, or is no response: `UselessAnswer`.
        ValueError: If it has no log-probabilities, which the server will not have the next time either.
    """
    try:
        choice = answer["choices"][0]
        ids, reason, reported = [*map(operator.index, choice["token_ids"])], choice["finish_reason"], choice["logprobs"]
        reported = reported and reported["token_logprobs"]
        logprobs = [math.nan if logprob is None else float(logprob) for logprob in reported or ()]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise _useless(f"it must have `token_ids`, `logprobs` and `finish_reason`; {said(error)}", answer) from None
    if reason not in ("stop", "length"):  # "abort", say, of a server that ends.
        raise ServerGone(f"an answer without a whole response: it was cut off ({reason})")
    most = request.parameters["max_tokens"]
    if not 0 < len(ids) <= most:
        raise _useless(f"it has {len(ids)} tokens of at least 1 and at most {most}", answer)
    if not 0 <= min(ids) <= max(ids) < 2**31:  # Ids beyond the vocabulary are noticed with the batch.
        raise _useless(f"its ids go from {min(ids)} to {max(ids)}", answer)
    if not reported:
        raise ValueError(
            f"A vLLM server must report log-probabilities, but answered with `logprobs` {choice['logprobs']!r:.40} for "
            f"{len(ids)} tokens. Look for what leaves them out: an option of the server, or a proxy before it."
        )
    if len(logprobs) != len(ids):
        raise _useless(f"it has {len(logprobs)} log-probabilities for {len(ids)} tokens", answer)
    return Completion(ids, logprobs, reason)


def _useless(why: str, answer: Any) -> UselessAnswer:
    return UselessAnswer(f"an answer without a whole response: {why}, in {str(answer)[:120]}")

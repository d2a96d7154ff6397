"""Rollouts from vLLM servers, on this machine or on others."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import uuid
import weakref
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError
from torch import Tensor

from grail_lightning.core.engines.base import RolloutEngine, TurnSampler
from grail_lightning.core.engines.requests import Completion, Request, row_seeds, sample, sample_turns
from grail_lightning.core.engines.vllm.client import (
    LOG,
    ServerClient,
    ServerGone,
    ServerSlow,
    UselessAnswer,
    Weights,
    Workers,
    all_of,
)
from grail_lightning.core.engines.vllm.probe import Bound, check_probe, probe_requests
from grail_lightning.core.engines.vllm.weights import WeightFile, checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.core.environments.side_by_side import background_loop
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading, PolicySource, resolve_policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import SampledBatch, Sampling
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import all_gather_objects, on_first_rank, rank

_T = TypeVar("_T")

_MOST_ROUNDS = 10
# What would hardly be otherwise a third time, with the advice that follows.
_TWICE = {
    ServerSlow: "Look at their logs, or raise `engine.answer_seconds` if responses take longer.",
    UselessAnswer: "They answer the same request in the same way: look at their logs, and at what is between.",
}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  (files in memory, under Linux)
_THIS_MACHINE = ("localhost", "127.", "::1")


class VLLMServer(RolloutEngine):
    """An engine that samples with vLLM servers, to which it pushes the weights of the policy.

    The page "Sampling with vLLM" has the command that starts a server. Prompts are dealt to the servers in turn, and
    each response has a seed of its own: which server answers makes no difference beyond roundings. Rank 0 pushes the
    weights to all of them whenever they have changed, and a probe compares the log-probabilities of every server with
    the trainer's.

    A server that goes away is asked again. One that was restarted has other weights, which is noticed before its
    responses count: the weights are pushed again, and the batch is sampled again.

    Args:
        urls: The addresses of the servers, such as ``http://127.0.0.1:8000``.
        bound: Most difference between the log-probabilities of a server and of the trainer; default by their dtypes.
        patience_seconds: How long a server that does not answer is asked again, before the run ends.
        wait_seconds: How long the start of a run waits for servers that are still loading their model.
        answer_seconds: How long one response may take.
        push_folder: A folder that trainer and servers see under the same path, through which weights are pushed. The
            default is the memory of this machine.
    """

    copies_weights = True
    samples_elsewhere = True

    def __init__(
        self,
        urls: list[str],
        bound: Bound | None = None,
        patience_seconds: float = 300.0,
        wait_seconds: float = 0.0,
        answer_seconds: float = 3600.0,
        push_folder: str = _SHARED_MEMORY,
    ) -> None:
        if isinstance(urls, str) or not urls:  # type: ignore[unreachable]
            raise ValueError(f"`urls` must be a list of at least one address, but got {urls!r}.")
        check_option("patience_seconds", patience_seconds, "[0, inf)")
        check_option("wait_seconds", wait_seconds, "[0, inf)")
        check_option("answer_seconds", answer_seconds, "[1, inf)")
        self._servers = [ServerClient(url, patience_seconds, answer_seconds) for url in urls]
        if len({server.url for server in self._servers}) < len(urls):
            raise ValueError(f"`urls` must hold each address once, but got {urls}.")
        here = all(server.host.startswith(_THIS_MACHINE) for server in self._servers)
        if not os.path.isdir(push_folder) or not (here or push_folder != _SHARED_MEMORY):
            raise ValueError(
                "`push_folder` must be a folder that trainer and servers see under the same path, but got "
                f"{push_folder!r} with {', '.join(urls)}. Make it, on a file system that they share."
            )
        self.bound, self.wait_seconds = bound, wait_seconds
        self._file = WeightFile(push_folder, hashlib.sha256(" ".join(urls).encode()).hexdigest()[:16])
        self._end = weakref.finalize(self, self._file.close)
        self._policy: Policy | None = None
        self._weights: Weights | None = None
        self._prints: Tensor | None = None
        self._room: int | None = None
        self._name, self._pushes = uuid.uuid4().hex, 0
        self._calls: set[Future[Any]] = set()
        self._cancels = 0

    def close(self) -> None:
        """Give up the weights that servers could read. Python's end does it, too."""
        self.cancel()
        self._end()

    def cancel(self) -> None:
        """Make a `generate` that runs in another thread raise `concurrent.futures.CancelledError` soon."""
        self._cancels += 1
        for call in list(self._calls):
            call.cancel()

    def _await(self, call: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(call, background_loop("vllm-servers"))
        self._calls.add(future)
        try:
            return future.result()
        finally:
            future.cancel()  # After an interrupt; nothing happens to one that has ended.
            self._calls.discard(future)

    @property
    def room(self) -> int | None:
        """See `RolloutEngine.room`: that of the smallest server, which is known from the first push on."""
        return self._room

    def check(self, policy: PolicySource, loading: Loading) -> None:
        """See `RolloutEngine.check`: every server answers, and has the extension that takes weights."""
        for server in self._servers:
            server.model = resolve_policy(policy) if isinstance(policy, str) else str(policy)
        self._await(all_of(server.patiently(server.workers, self.wait_seconds) for server in self._servers))

    # --- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, policy: Policy) -> None:
        """Push the weights if they have changed, and compare the log-probabilities of a probe. A collective."""
        self._policy = policy
        prints = fingerprint(policy)
        if same_on_all_ranks(prints, self._prints):
            return
        self._weights = self._prints = None
        self._check_machines()
        weights = self._publish(policy)
        on_first_rank(lambda: self._await(all_of(server.load(weights) for server in self._servers)))
        self._weights = weights
        try:
            self.verify(policy)
        except BaseException:
            self._weights = None  # No rollouts from weights that failed their probe.
            raise
        self._prints = prints

    def verify(self, policy: Policy) -> None:
        """Compare the log-probabilities of every server with those of the policy. A collective."""
        requests = probe_requests(policy)
        everyone = [list(range(len(requests)))] * len(self._servers)
        answers, dtypes = on_first_rank(lambda: self._await(self._complete(requests, everyone)))
        for server, completions, dtype in zip(self._servers, answers, dtypes, strict=True):
            agreement = check_probe(
                policy,
                requests,
                completions,
                engine=f"VLLMServer at {server.url}",
                dtype=getattr(torch, dtype),
                bound=self.bound,
                since="after a push",
            )
            if self._pushes == 1:
                rank_zero_info(f"vLLM samples at {server.url}. {agreement}")

    def _check_machines(self) -> None:
        """Check that every rank means the same servers: the first alone pushes. A collective."""
        machines = sorted(set(all_gather_objects(socket.gethostname())))
        here = [server.url for server in self._servers if server.host.startswith(_THIS_MACHINE)]
        if here and len(machines) > 1:
            raise ValueError(
                f"`urls` must name servers as every machine reaches them, but got {here[0]} with ranks on "
                f"{', '.join(machines)}. Write the name of the server's machine."
            )

    def _publish(self, policy: Policy) -> Weights:
        """Write the weights. Every rank gathers in step with the first, which writes."""
        of_servers = on_first_rank(lambda: self._await(all_of(s.patiently(s.workers) for s in self._servers)))
        dtype = of_servers[0][0]["dtype"]
        self._room = min(workers[0]["max_model_len"] for workers in of_servers)
        self._pushes += 1
        version, path, failed = f"{self._name}-{self._pushes}", "", ""
        tensors = checkpoint_weights(policy)
        if rank() == 0:
            try:
                path = self._file.write(version, tensors, getattr(torch, dtype))
            except (OSError, ValueError, SafetensorError) as error:
                failed = f"The weights cannot be written for the servers: {error}. Set `engine.push_folder`."
        for _ in tensors:  # What is left of a collective.
            pass
        failed, version, path = all_gather_objects((failed, version, path))[0]
        if failed:
            raise ValueError(failed)
        return Weights(version=version, path=path)

    # --- rollouts -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """See `RolloutEngine.generate`."""
        return self.generate_seeded(prompts, group_size, sampling, row_seeds(seed, len(prompts) * group_size))

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`. No collective: ranks may sample different numbers of prompts."""
        return sample(self._pushed, prompts, group_size, sampling, seeds, partial(self._send, self._cancels))

    def turns(self, sampling: Sampling) -> AbstractContextManager[TurnSampler]:
        """See `RolloutEngine.turns`. No collective, as in `generate_seeded`."""
        return nullcontext(partial(sample_turns, self._pushed, sampling, partial(self._send, self._cancels)))

    @property
    def _pushed(self) -> Policy:
        if self._policy is None or self._weights is None:
            raise ValueError("`VLLMServer` has pushed no weights yet. Call `update_weights(policy)` first.")
        return self._policy

    def _send(self, cancels: int, requests: Sequence[Request]) -> list[Completion]:
        """The completions of requests: prompts go to the servers in turn, equal prompts to the same one."""
        if cancels != self._cancels:  # Perhaps between two turns, while a tool ran.
            raise CancelledError
        numbers: dict[tuple[int, ...], int] = {}
        shares: list[list[int]] = [[] for _ in self._servers]
        for row, request in enumerate(requests):
            number = numbers.setdefault(tuple(request.prompt), len(numbers))
            shares[(rank() + number) % len(shares)].append(row)  # One prompt a rank occupies all servers.
        answers, _ = self._await(self._complete(requests, shares))
        by_row = dict(zip(chain(*shares), chain(*answers), strict=True))
        return [by_row[row] for row in range(len(requests))]

    async def _complete(
        self, requests: Sequence[Request], shares: Sequence[Sequence[int]]
    ) -> tuple[list[list[Completion]], list[str]]:
        """For each server that has a share of the requests, their completions, and its dtype.

        Answers count if every server was the same process with the same weights before and after; else all are asked
        for again. A row depends on its seed alone, so nothing is lost but time.
        """
        weights, reason, advice, seen = self._weights, "", "Look at their logs.", Counter[type[ServerGone]]()
        assert weights is not None
        dealt = zip(self._servers, shares, strict=True)
        busy = [(server, [requests[row] for row in share]) for server, share in dealt if share]
        for attempt in range(_MOST_ROUNDS):
            try:
                before = await all_of(self._ready(server, weights) for server, part in busy)
                answers = await all_of(server.complete(part, weights) for server, part in busy)
                if before == await all_of(server.workers() for server, _ in busy):
                    return answers, [str(workers[0]["dtype"]) for workers in before]
                reason = "a server was started again, or another run pushed weights"
            except ServerGone as error:
                reason = str(error)
                seen[type(error)] += 1
                if type(error) in _TWICE and seen[type(error)] == 2:
                    advice = _TWICE[type(error)]
                    break
            LOG.warning(f"A vLLM server failed ({reason}). {len(requests)} responses are sampled again.")
            await asyncio.sleep(min(0.1 * 2**attempt, 10.0))
        raise ValueError(
            f"The servers {', '.join(server.url for server in self._servers)} failed {attempt + 1} times to sample "
            f"{len(requests)} responses ({reason}). {advice} Then repeat your command; training goes on from its last "
            "checkpoint with --ckpt_path=last."
        )

    async def _ready(self, server: ServerClient, weights: Weights) -> Workers:
        """The workers of a server that has these weights; they are pushed again if it has others."""
        workers = await server.patiently(server.workers)
        if not weights.are_in(workers):
            LOG.warning(
                f"{server.url} has other weights than the last push: it was started again, or another run uses it. "
                "They are pushed again."
            )
            self._prints = None  # The next `update_weights` compares log-probabilities again.
            await server.load(weights)
            workers = await server.workers()
            if not weights.are_in(workers):  # It was started again meanwhile.
                raise ServerGone(f"{server.url} has lost the weights of the last push")
        return workers

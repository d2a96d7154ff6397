"""`VLLMServer`: rollouts from vLLM servers, on this machine or on others."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
import weakref
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities import rank_zero_info
from safetensors import SafetensorError
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines.vllm import probe
from grail_lightning.engines.vllm.client import LOG, Calls, ServerClient, ServerGone, Status, Weights, all_of
from grail_lightning.engines.vllm.requests import Completion, Request, SeededEngine, sample
from grail_lightning.engines.vllm.weights import WeightFile, checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.policy import Loading, Policy
from grail_lightning.policy.options import PolicySource, resolve_policy
from grail_lightning.runtime.collectives import all_gather_objects, on_first_rank, rank
from grail_lightning.tasks.base import Prompt

_MOST_ROUNDS = 10
_THIS_MACHINE = ("localhost", "127.", "::1")


class VLLMServer(SeededEngine):
    """An engine that samples with vLLM servers, to which it pushes the weights of the policy.

    `docs/vllm.md` has the command that starts a server. The prompts of a rank are dealt to the servers in turn, the
    responses to one prompt stay together, and each response has a seed of its own: which server answers, and when,
    makes no difference beyond roundings. All servers have the same weights: rank 0 pushes them whenever they have
    changed, the other ranks wait, and a probe compares the log-probabilities of every server with the trainer's.

    A server that goes away is asked again, with pauses that double. One that was restarted has other weights, which is
    noticed before its responses count: the weights are pushed again, and the batch is sampled again.

    Args:
        urls: The addresses of the servers, such as ``http://127.0.0.1:8000``.
        bound: Most difference between the log-probabilities of a server and of the trainer; default by their dtypes.
        patience_seconds: How long a server that does not answer is asked again, before the run ends.
        wait_seconds: How long the start of a run waits for servers that are still loading their model.
        answer_seconds: How long one response may take.
        requests_at_once: Most responses in flight at one server, for each rank.
        push_folder: A folder that trainer and servers see under the same path, through which weights are pushed;
            default the memory of this machine, if all servers are on it.

    Raises:
        ValueError: If there is no URL, one is malformed or occurs twice, a number is out of range, or a server on
            another machine has no folder.
    """

    own_weights = True
    samples_elsewhere = True

    def __init__(
        self,
        urls: list[str],
        bound: probe.Bound | None = None,
        patience_seconds: float = 300.0,
        wait_seconds: float = 0.0,
        answer_seconds: float = 3600.0,
        requests_at_once: int = 256,
        push_folder: str | None = None,
    ) -> None:
        if isinstance(urls, str) or not urls:  # type: ignore[unreachable]
            raise ValueError(f"`urls` must be a list of at least one address, but got {urls!r}.")
        for name, value, least in (
            ("patience_seconds", patience_seconds, 0),
            ("wait_seconds", wait_seconds, 0),
            ("answer_seconds", answer_seconds, 1),
            ("requests_at_once", requests_at_once, 1),
        ):
            if not value >= least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        self._servers = [ServerClient(url, patience_seconds, answer_seconds, requests_at_once) for url in urls]
        if len({server.url for server in self._servers}) < len(urls):
            raise ValueError(f"`urls` must hold each address once, but got {urls}.")
        elsewhere = [server.url for server in self._servers if not server.host.startswith(_THIS_MACHINE)]
        if (elsewhere and push_folder is None) or (push_folder is not None and not os.path.isdir(push_folder)):
            raise ValueError(
                "`push_folder` must be a folder that trainer and servers see under the same path, but got "
                f"{push_folder!r} with {', '.join(urls)}. Make it, on a file system that they share."
            )
        self.bound, self.wait_seconds = bound, wait_seconds
        self._calls, self._file = Calls(), WeightFile(push_folder)
        self._end = weakref.finalize(self, self._file.close)
        self._policy: Policy | None = None
        self._weights: Weights | None = None
        self._prints: Tensor | None = None
        self._run, self._pushes = uuid.uuid4().hex, 0

    def close(self) -> None:
        """Give up the weights that servers could read. Python's end does it, too."""
        self.cancel()
        self._end()

    def cancel(self) -> None:
        """Make a `generate` that runs in another thread raise soon."""
        self._calls.cancel()

    def check(self, policy: PolicySource, loading: Loading) -> None:
        """See `RolloutEngine.check`: every server answers, and has the extension that takes weights.

        Raises:
            ValueError: If one does not.
        """
        for server in self._servers:
            server.model = resolve_policy(policy) if isinstance(policy, str) else str(policy)
        self._calls.run(all_of(self._first_answer(server) for server in self._servers))

    async def _first_answer(self, server: ServerClient) -> Status:
        def waits(reason: str) -> None:
            if self.wait_seconds:
                rank_zero_info(
                    f"{server.url} does not answer yet ({reason}). The run waits for it up to {self.wait_seconds:g} s."
                )

        try:
            return await server.until_answered(server.status, self.wait_seconds, waits)
        except ServerGone as error:
            raise ValueError(
                f"{server.url} must be a vLLM server, but does not answer ({error}). Start it: {server.command}; or "
                "let the run wait for it with `engine.wait_seconds`."
            ) from None

    # --- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, policy: Policy) -> None:
        """Push the weights if they have changed, and compare the log-probabilities of a probe. A collective.

        Raises:
            ValueError: If a server stays away, cannot take the weights, or computes other log-probabilities; or if
                ranks on several machines name a server by an address that each machine has.
        """
        self._policy = policy
        prints = fingerprint(policy)
        if same_on_all_ranks(prints, self._prints):
            return
        self._weights = self._prints = None
        self._check_machines()
        weights = self._publish(policy)
        on_first_rank(lambda: self._calls.run(all_of(server.load(weights) for server in self._servers)))
        self._weights = weights
        try:
            self.verify(policy)
        except BaseException:
            self._weights = None  # No rollouts from weights that failed their probe.
            raise
        self._prints = prints

    def verify(self, policy: Policy) -> None:
        """Compare the log-probabilities of every server with those of the policy. A collective.

        Raises:
            ValueError: If they differ by more than the bound, or no weights were pushed.
        """
        requests = probe.probe_requests(policy)
        everyone = list(range(len(requests)))
        answers, dtypes = on_first_rank(
            lambda: self._calls.run(self._complete(requests, [everyone] * len(self._servers)))
        )
        for server, completions, dtype in zip(self._servers, answers, dtypes, strict=True):
            gap = probe.measure_gap(policy, requests, completions)
            bound = self.bound or probe.default_bound(getattr(torch, dtype), policy.compute_dtype)
            names = f"server in {dtype}, trainer in {probe.dtype_name(policy.compute_dtype)}"
            probe.check_gap(gap, bound, engine=f"VLLMServer at {server.url}", dtypes=names, since="after a push")
            if self._pushes == 1:
                rank_zero_info(f"vLLM samples at {server.url}. {probe.describe_gap(gap, names)}")

    def _check_machines(self) -> None:
        """Check that every rank means the same servers: the first alone pushes and probes. A collective."""
        machines = sorted(set(all_gather_objects(socket.gethostname())))
        here = [server.url for server in self._servers if server.host.startswith(_THIS_MACHINE)]
        if here and len(machines) > 1:
            raise ValueError(
                f"`urls` must name servers as every machine reaches them, but got {here[0]} with ranks on "
                f"{', '.join(machines)}. Write the name of the server's machine."
            )

    def _publish(self, policy: Policy) -> Weights:
        """Write the weights where the servers find them. Every rank gathers in step with the first, which writes."""
        dtype = on_first_rank(lambda: self._calls.run(self._servers[0].patiently(self._servers[0].status))).dtype
        self._pushes += 1
        version, path, failed = f"{self._run}-{self._pushes}", "", ""
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

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`. No collective: ranks may sample different numbers of prompts.

        Raises:
            ValueError: Before `update_weights`; if a server stays away or refuses a prompt; or see `sample`.
        """
        if self._policy is None or self._weights is None:
            raise ValueError("`VLLMServer` has pushed no weights yet. Call `update_weights(policy)` first.")
        return sample(self._policy, prompts, group_size, sampling, seeds, self._send)

    def _send(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of requests, each by the server that `deal` names."""
        shares = deal([request.prompt for request in requests], len(self._servers), rank())
        answers, _ = self._calls.run(self._complete(requests, shares))
        by_row = {
            row: completion
            for share, completions in zip(shares, answers, strict=True)
            for row, completion in zip(share, completions, strict=True)
        }
        return [by_row[row] for row in range(len(requests))]

    async def _complete(
        self, requests: Sequence[Request], shares: Sequence[Sequence[int]]
    ) -> tuple[list[list[Completion]], list[str]]:
        """For each server the completions of its share of the requests, and its dtype.

        Answers count if every server was the same process with the same weights before the first and after the last of
        them; else all are asked for again. A row depends on its seed alone, so nothing is lost but time.

        Raises:
            ValueError: If a server stays away, comes back too often, or refuses a request.
        """
        weights, reason = self._weights, ""
        if weights is None:
            raise ValueError("`VLLMServer` has pushed no weights yet. Call `update_weights(policy)` first.")
        busy = [server for server, share in zip(self._servers, shares, strict=True) if share]
        parts = [[requests[row] for row in share] for share in shares]
        for attempt in range(_MOST_ROUNDS):
            try:
                before = await all_of(self._ready(server, weights) for server in busy)
                answers = await all_of(
                    server.complete(part, weights) for server, part in zip(self._servers, parts, strict=True)
                )
                if before == await all_of(server.status() for server in busy):
                    return answers, [status.dtype for status in before]
                reason = "a server was started again, or another run pushed weights"
            except ServerGone as error:
                reason = str(error)
            LOG.warning(f"A vLLM server failed ({reason}). {len(requests)} responses are sampled again.")
            await asyncio.sleep(min(0.1 * 2**attempt, 10.0))
        raise ValueError(
            f"The servers {', '.join(server.url for server in self._servers)} failed {_MOST_ROUNDS} times to sample "
            f"{len(requests)} responses ({reason}). Look at their logs. Then repeat your command; training goes on "
            "from its last checkpoint with --ckpt_path=last."
        )

    async def _ready(self, server: ServerClient, weights: Weights) -> Status:
        """The state of a server that has these weights; they are pushed again if it has others."""
        status = await server.patiently(server.status)
        if status.version != weights.version:
            LOG.warning(
                f"{server.url} has other weights than the last push ({status.version or 'those it was started with'}; "
                "it was started again, or another run uses it). They are pushed again."
            )
            self._prints = None  # The next `update_weights` compares log-probabilities again.
            await server.load(weights)
            status = await server.status()
            if status.version != weights.version:  # It was started again meanwhile.
                raise ServerGone(f"{server.url} has lost the weights of the last push")
        return status


def deal(prompts: Sequence[Sequence[int]], servers: int, rank: int) -> list[list[int]]:
    """The numbers of the rows that each server gets: prompts in turn, equal prompts together.

    Ranks begin with different servers, so that one prompt a rank occupies them all.
    """
    numbers: dict[tuple[int, ...], int] = {}
    shares: list[list[int]] = [[] for _ in range(servers)]
    for row, prompt in enumerate(prompts):
        number = numbers.setdefault(tuple(prompt), len(numbers))
        shares[(rank + number) % servers].append(row)
    return shares

"""`VLLMServer`: rollouts from vLLM servers, on this machine or on others."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines.vllm import probe
from grail_lightning.engines.vllm.client import ServerClient, ServerGone
from grail_lightning.engines.vllm.protocol import Pushed, Status, deal
from grail_lightning.engines.vllm.publish import WeightFile, check_places, most_tensors
from grail_lightning.engines.vllm.remote import RemoteServer
from grail_lightning.engines.vllm.requests import Completion, Request, SeededEngine, sample
from grail_lightning.engines.vllm.weights import checkpoint_weights, fingerprint, same_on_all_ranks
from grail_lightning.policy import Loading, Policy
from grail_lightning.policy.options import PolicySource, read_config, resolve_policy
from grail_lightning.runtime.collectives import all_gather_objects, on_first_rank, rank
from grail_lightning.tasks.base import Prompt

T = TypeVar("T")

_COMPARED = ("vocab_size", "hidden_size", "num_hidden_layers")


class VLLMServer(SeededEngine):
    """An engine that samples with vLLM servers, to which it pushes the weights of the policy.

    `docs/vllm.md` has the command that starts a server. The prompts of a rank are dealt to the servers in turn, the
    responses to one prompt stay together, and each response has a seed of its own: which server answers, and when,
    makes no difference beyond roundings. All servers have the same weights: rank 0 pushes them whenever they have
    changed, the other ranks wait, and a probe compares the log-probabilities of every server with the trainer's.

    A server that goes away is asked again, with pauses that double. One that was restarted has other weights, which is
    noticed before its responses count: the weights are pushed again, and its part of the batch is sampled again.

    Args:
        urls: The addresses of the servers, such as ``http://127.0.0.1:8000``.
        bound: Most difference between the log-probabilities of a server and of the trainer; default by their dtypes.
        patience_seconds: How long a server that does not answer is asked again, before the run ends.
        wait_seconds: How long the start of a run waits for servers that are still loading their model.
        answer_seconds: How long one response may take.
        requests_at_once: Most responses in flight at one server, for each rank.
        push_folder: A folder that trainer and servers see under the same path, through which weights are pushed;
            default memory for servers on this machine, and HTTP for others.
        push_address: ``HOST`` or ``HOST:PORT`` under which servers on other machines fetch the weights from rank 0;
            default the address from which it reaches them, and any free port.

    Raises:
        ValueError: If there is no URL, one is malformed or occurs twice, or a number is out of range.
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
        push_address: str | None = None,
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
        if push_folder is not None and not os.path.isdir(push_folder):
            raise ValueError(f"`push_folder` must be a folder, but got {push_folder!r}. Make it.")
        key = os.environ.get("VLLM_API_KEY")
        clients = [ServerClient(url, answer_seconds, key) for url in urls]
        if len({client.url for client in clients}) < len(clients):
            raise ValueError(f"`urls` must hold each address once, but got {urls}.")
        self.bound, self.wait_seconds = bound, wait_seconds
        self._servers = [
            RemoteServer(client, number, patience_seconds, requests_at_once) for number, client in enumerate(clients)
        ]
        self._file = WeightFile(push_folder, push_address)
        self._end = weakref.finalize(self, _close, [client.close for client in clients], self._file)
        self._policy: Policy | None = None
        self._pushed: Pushed | None = None
        self._prints: Tensor | None = None
        self._run, self._pushes = uuid.uuid4().hex, 0

    def close(self) -> None:
        """Close all connections, and give up the weights that servers could read. Python's end does it, too."""
        self._end()

    def cancel(self) -> None:
        """Make a `generate` that runs in another thread raise soon."""
        for server in self._servers:
            server.client.close()

    # --- before training ----------------------------------------------------------------------------------------

    def check(self, policy: PolicySource, loading: Loading) -> None:
        """See `RolloutEngine.check`: every server answers, takes weights, and serves a model of the policy's shape.

        Raises:
            ValueError: If one does not.
        """
        config = read_config(policy, loading.trust_remote_code).get_text_config()
        ours = {name: int(getattr(config, name)) for name in _COMPARED if hasattr(config, name)}
        for server in self._servers:
            server.model = resolve_policy(policy) if isinstance(policy, str) else str(policy)
            server.check_facts(self._first_status(server).facts, ours)

    def _first_status(self, server: RemoteServer) -> Status:
        url, seconds = server.client.url, self.wait_seconds

        def waits(reason: str) -> None:
            if seconds:
                rank_zero_info(f"{url} does not answer yet ({reason}). The run waits for it up to {seconds:g} s.")

        try:
            server.client.until_answered(server.release, seconds, waits)
            return server.client.until_answered(server.status, seconds)
        except ServerGone as error:
            raise ValueError(
                f"{url} must be a vLLM server, but does not answer ({error}). Start it: {server.command}; or let the "
                "run wait for it with `engine.wait_seconds`."
            ) from None

    # --- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, policy: Policy) -> None:
        """Push the weights if they have changed, and compare the log-probabilities of a probe. A collective.

        Raises:
            ValueError: If a server stays away, cannot take the weights, or computes other log-probabilities.
        """
        self._policy = policy
        self._reopen()
        prints = fingerprint(policy)
        if same_on_all_ranks(prints, self._prints):
            return
        self._pushed = self._prints = None
        check_places([server.client for server in self._servers])
        pushed = self._publish(policy)
        on_first_rank(lambda: self._everywhere([partial(server.load, pushed) for server in self._servers]))
        self._pushed = self.verify(policy, pushed)
        self._prints = prints

    def verify(self, policy: Policy, pushed: Pushed | None = None) -> Pushed:
        """Compare the log-probabilities of every server with those of the policy. A collective.

        Args:
            policy: The policy.
            pushed: The weights that the servers should have; default those of the last push.

        Returns:
            The weights with the servers' answers.

        Raises:
            ValueError: If they differ by more than the bound, or no weights were pushed.
        """
        pushed = pushed or self._pushed
        if pushed is None:
            raise ValueError("`VLLMServer` has pushed no weights yet. Call `update_weights(policy)` first.")
        requests = probe.probe_requests(policy)
        asked = [partial(server.complete, requests, replace(pushed, answers=())) for server in self._servers]
        dtype, answers = on_first_rank(lambda: (self._servers[0].dtype, self._everywhere(asked)))
        bound = self.bound or probe.default_bound(getattr(torch, dtype), policy.compute_dtype)
        dtypes = f"server in {dtype}, trainer in {probe.dtype_name(policy.compute_dtype)}"
        since = f"after push {self._pushes}"
        for server, completions in zip(self._servers, answers, strict=True):
            gap = probe.measure_gap(policy, requests, completions)
            probe.check_gap(gap, bound, engine=f"VLLMServer at {server.client.url}", dtypes=dtypes, since=since)
            if not pushed.answers and self._pushes == 1:
                rank_zero_info(
                    f"vLLM samples at {server.client.url}. Log-probabilities of sampler and trainer differ by "
                    f"{gap.mean:.2g} nats on average and {gap.largest:.2g} at most over {gap.tokens} tokens ({dtypes})."
                )
        return replace(pushed, probe=tuple(requests), answers=tuple(map(tuple, answers)), bound=bound)

    def _publish(self, policy: Policy) -> Pushed:
        """Write the weights where the servers find them. Every rank gathers in step with the first, which writes."""
        dtype = on_first_rank(self._common_dtype)
        self._pushes += 1
        version = f"{self._run}-{self._pushes}"
        weights, failed, sources = checkpoint_weights(policy), "", list[str]()
        if rank() == 0:
            try:
                self._file.write(version, weights, most_tensors(policy), getattr(torch, dtype))
                sources = [self._file.source(server.client.host, server.client.port) for server in self._servers]
            except (OSError, ValueError) as error:
                failed = f"The weights cannot be written for the servers: {error}. Set `engine.push_folder`."
        for _ in weights:  # What is left of a collective.
            pass
        failed, version, sources = all_gather_objects((failed, version, sources))[0]
        if failed:
            raise ValueError(failed)
        return Pushed(version=version, sources=tuple(sources))

    def _common_dtype(self) -> str:
        """The dtype of all servers, which are asked until they answer.

        Raises:
            ValueError: If they differ.
        """
        found = self._everywhere([server.known for server in self._servers])
        dtypes = [str(status.facts.get("dtype")) for status in found]
        for server in self._servers:
            server.dtype = dtypes[0]
        if len(set(dtypes)) > 1:
            raise ValueError(
                f"The servers must compute in one dtype, but got {', '.join(dtypes)}. Set their `--dtype`."
            )
        return dtypes[0]

    # --- rollouts -----------------------------------------------------------------------------------------------

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`. No collective: ranks may sample different numbers of prompts.

        Raises:
            ValueError: Before `update_weights`; if a server stays away or refuses a prompt; or see `sample`.
        """
        if self._policy is None or self._pushed is None:
            raise ValueError("`VLLMServer` has pushed no weights yet. Call `update_weights(policy)` first.")
        self._reopen()
        return sample(self._policy, prompts, group_size, sampling, seeds, partial(self._send, self._pushed))

    def _send(self, pushed: Pushed, requests: Sequence[Request]) -> list[Completion]:
        """The completions of requests, each by the server that `deal` names."""
        shares = deal([request.prompt for request in requests], len(self._servers), rank())
        busy = [(server, share) for server, share in zip(self._servers, shares, strict=True) if share]
        found = self._everywhere(
            [partial(server.complete, [requests[k] for k in share], pushed) for server, share in busy]
        )
        placed = {
            k: row for (_, share), rows in zip(busy, found, strict=True) for k, row in zip(share, rows, strict=True)
        }
        return [placed[k] for k in range(len(requests))]

    def _everywhere(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of calls to servers, made side by side. If one fails, or on an interrupt, all are given up."""
        if not calls:
            return []
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            except BaseException:
                self.cancel()
                wait(futures)
                raise
        return [future.result() for future in futures]

    def _reopen(self) -> None:
        """Allow requests again after `cancel`."""
        for server in self._servers:
            server.client.reopen()


def _close(clients: Sequence[Callable[[], None]], file: WeightFile) -> None:
    for close in clients:
        close()
    file.close()

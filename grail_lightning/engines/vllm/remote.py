"""One vLLM server as the engine sees it: its state, its weights, and the completions it gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from grail_lightning.engines.vllm.client import ServerClient, ServerGone, ServerRefused
from grail_lightning.engines.vllm.probe import check_gap
from grail_lightning.engines.vllm.protocol import (
    EXTENSION,
    Pushed,
    Status,
    body_of,
    gap_of_answers,
    read_completion,
    read_status,
)
from grail_lightning.engines.vllm.requests import Completion, Request
from grail_lightning.engines.vllm.versions import CEILING, FLOOR, check_release

T = TypeVar("T")

_MOST_ROUNDS = 10
_CONTROL_SECONDS = 60.0  # For questions about its state, which a server answers between two steps of decoding.
# Lightning prints what this logger is told; unlike `rank_zero_info` from every rank, for one rank alone may notice.
_LOG = logging.getLogger("lightning.pytorch.utilities.rank_zero")


class RemoteServer:
    """A server to which weights are pushed, and which completes prompts with them.

    Args:
        client: The client of the server.
        number: Its place among the servers.
        patience: The seconds for which a server that is gone is asked again.
        at_once: Most requests in flight.
        model: The model that it should serve, for messages.
    """

    def __init__(self, client: ServerClient, number: int, patience: float, at_once: int) -> None:
        self.client, self.number, self.patience, self.at_once = client, number, patience, at_once
        self.model, self.dtype = "MODEL", "auto"
        self.room: int | None = None

    @property
    def command(self) -> str:
        """The command that starts this server."""
        return (
            f"VLLM_SERVER_DEV_MODE=1 vllm serve {self.model} --port {self.client.port} --dtype {self.dtype} "
            f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}"
        )

    # --- state ------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """The state of the server, asked once.

        Raises:
            ServerGone: If it does not answer.
            ServerRefused: If it has no worker extension, or another release's.
        """
        status = self._workers("grail_status")
        room = status.facts.get("max_model_len")
        self.room = room if isinstance(room, int) else None
        return status

    def release(self) -> None:
        """Check the server's release of vLLM, asked once.

        Raises:
            ServerGone: If it does not answer.
            ValueError: If it is too old or too new.
        """
        answer = self.client.call("GET", "/version", seconds=_CONTROL_SECONDS)
        try:
            found = Version(str(answer["version"]))
        except (KeyError, TypeError, InvalidVersion):
            raise ServerGone(f"no version: {str(answer)[:80]}") from None
        check_release(found, self.client.url, f'Install it there: pip install "vllm>={FLOOR},<{CEILING}".')

    def check_facts(self, facts: Mapping[str, object], ours: Mapping[str, int]) -> None:
        """Check what the server says about itself.

        Args:
            facts: Its status.
            ours: Figures of the policy's config.

        Raises:
            ValueError: If it serves another model, or reports other log-probabilities.
        """
        theirs = {name: facts.get(name) for name in ours}
        if theirs != ours:
            raise ValueError(
                f"{self.client.url} must serve the policy's model, with {_listed(ours)}, but it serves "
                f"{facts.get('model')} with {_listed(theirs)}. Start it with the policy: {self.command}"
            )
        if (mode := facts.get("logprobs_mode")) != "processed_logprobs":
            raise ValueError(
                f"{self.client.url} must report log-probabilities at the sampling temperature, but its "
                f"`logprobs_mode` is {mode}. Start it again: {self.command}"
            )

    def known(self) -> Status:
        """The state of the server, for which one waits.

        Raises:
            ValueError: If it stays away.
        """
        return self._waiting(self.status)

    def ready(self, pushed: Pushed) -> Status:
        """Wait until the server answers and has these weights; they are pushed again if it has others.

        Raises:
            ValueError: If the server stays away, or cannot take the weights.
        """
        status = self._waiting(self.status)
        if status.version == pushed.version:
            return status
        _LOG.warning(
            f"{self.client.url} has other weights than the last push ({status.version or 'those it was started with'}; "
            "it was started again, or another run uses it). They are pushed again."
        )
        status = self.load(pushed)
        if pushed.answers and pushed.bound is not None:
            said = self._ask([body_of(request, pushed) for request in pushed.probe])
            name = f"VLLMServer at {self.client.url}"
            gap = gap_of_answers(pushed.answers[self.number], said)
            check_gap(
                gap, pushed.bound, engine=name, dtypes="the trainer's after the last push", since="after a restart"
            )
        return status

    def load(self, pushed: Pushed) -> Status:
        """Give the server these weights. It has them completely, or no version.

        Raises:
            ValueError: If the server stays away, or cannot take the weights.
        """
        return self._waiting(lambda: self._load_once(pushed))

    def _load_once(self, pushed: Pushed) -> Status:
        source = pushed.sources[self.number]
        loaded = self._workers("grail_load", source, pushed.version)
        if loaded.errors:
            self._explain_failure(source, loaded)
        # Keys and values of earlier weights must not be used again: before the version is confirmed they are dropped.
        self.client.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        confirmed = self._workers("grail_confirm", pushed.version)
        if confirmed.version != pushed.version:
            raise ServerGone("it was started again during a push")
        return confirmed

    def _explain_failure(self, source: str, loaded: Status) -> None:
        reason = loaded.errors[0]
        if loaded.facts.get("broken"):
            raise ValueError(
                f"{self.client.url} could not load the weights of the policy ({reason}), and has a part of them. Does "
                f"it serve the policy's model? Start it again: {self.command}"
            )
        if source.startswith(("http://", "https://")):
            raise ServerGone(reason)
        raise ValueError(
            f"{self.client.url} cannot read the weights: {reason}. Trainer and server must run as one user outside of "
            "separate containers, or set `engine.push_folder` to a folder that both see under the same path."
        )

    # --- completions ------------------------------------------------------------------------------------------------

    def complete(self, requests: Sequence[Request], pushed: Pushed) -> list[Completion]:
        """Complete prompts with the pushed weights.

        Answers count if the server was the same process with the same weights before the first and after the last of
        them. A row depends on its seed alone, so answers of a restarted server are what the first one would have given.

        Raises:
            ValueError: If the server stays away, comes back too often, or refuses a request.
        """
        bodies = [body_of(request, pushed) for request in requests]
        reason = ""
        for number in range(_MOST_ROUNDS):
            try:
                before = self.ready(pushed)
                self._check_room(requests)
                found = self._ask(bodies)
                after = self.status()
            except ServerGone as error:
                reason = str(error)
            else:
                if (before.instance, before.version) == (after.instance, after.version):
                    return found
                reason = "it was started again, or another run pushed weights"
            _LOG.warning(f"{self.client.url}: {reason}. Its {len(requests)} responses of this batch are sampled again.")
            self.client.pause(min(0.1 * 2**number, 10.0))
        raise ValueError(
            f"{self.client.url} failed {_MOST_ROUNDS} times to sample {len(requests)} responses ({reason}). Look at "
            f"its log. {self._go_on()}"
        )

    def _check_room(self, requests: Sequence[Request]) -> None:
        longest = max((len(row.prompt) + row.parameters["max_tokens"] for row in requests), default=0)
        if self.room is not None and longest > self.room:
            raise ValueError(
                f"{self.client.url} has room for {self.room} tokens of a prompt and its response, but {longest} are "
                "asked for. Start it with a larger --max-model-len, or lower `sampling.max_response_length`."
            )

    def _ask(self, bodies: Sequence[dict[str, Any]]) -> list[Completion]:
        """The completions of prompts, asked once.

        Raises:
            ServerGone: If one got none.
            ValueError: If one was refused.
        """
        try:
            return [read_completion(answer) for answer in self.client.many("/v1/completions", bodies, self.at_once)]
        except ServerRefused as error:
            raise ValueError(f"{self.client.url} refused a prompt: {error}") from None

    # --- asking -----------------------------------------------------------------------------------------------------

    def _workers(self, method: str, *arguments: str) -> Status:
        """What the workers answer to a method of the extension."""
        try:
            seconds = _CONTROL_SECONDS if method == "grail_status" else None
            answer = self.client.call("POST", "/collective_rpc", {"method": method, "args": arguments}, seconds)
        except ServerRefused as error:
            if error.status not in (404, 405):
                raise
            raise ServerRefused(
                f"{self.client.url} takes no weights: it was started without VLLM_SERVER_DEV_MODE=1. Start it again: "
                f"{self.command}",
                error.status,
            ) from None
        except ServerGone as error:
            if f"no attribute '{method}'" not in str(error):
                raise
            raise ServerRefused(
                f"{self.client.url} takes no weights: it was started without --worker-extension-cls. Start it again: "
                f"{self.command}",
                500,
            ) from None
        return read_status(answer, self.client.url)

    def _waiting(self, ask: Callable[[], T]) -> T:
        """The result of `ask`, with the patience that a server gets.

        Raises:
            ValueError: If the server stays away.
        """

        def said(reason: str) -> None:
            _LOG.warning(f"{self.client.url} does not answer ({reason}). It is asked again for {self.patience:g} s.")

        try:
            return self.client.until_answered(ask, self.patience, said)
        except ServerGone as error:
            raise ValueError(
                f"{self.client.url} has not answered for {self.patience:g} s ({error}). Start it: {self.command}. "
                f"{self._go_on()}"
            ) from None

    @staticmethod
    def _go_on() -> str:
        return "Then repeat your command; training goes on from its last checkpoint with --ckpt_path=last."


def _listed(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())

"""What trainer and servers say to each other: records, and their forms in JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grail_lightning.engines.vllm.client import ServerGone, ServerRefused
from grail_lightning.engines.vllm.probe import Bound, Gap
from grail_lightning.engines.vllm.requests import Completion, Request
from grail_lightning.vllm_worker import PROTOCOL

EXTENSION = "grail_lightning.vllm_worker.WeightReceiver"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The newest weights, and where each server finds them.

    Attributes:
        version: The name of these weights, which no other weights of any run have.
        sources: For each server what it is told to read.
        probe: Requests whose answers were compared with the trainer's; empty before that.
        answers: For each server its answers to them.
        bound: The bound within which a server has to answer them again.
    """

    version: str
    sources: tuple[str, ...]
    probe: tuple[Request, ...] = ()
    answers: tuple[tuple[Completion, ...], ...] = ()
    bound: Bound | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a server, see `grail_lightning.vllm_worker.WeightReceiver.grail_status`.

    Attributes:
        instance: The processes of its workers; a server that was restarted has others.
        version: The version of its weights; None before the first push, and if its workers differ.
        facts: The status of its first worker.
        errors: What its workers report as failed.
    """

    instance: str
    version: str | None
    facts: dict[str, Any]
    errors: tuple[str, ...] = ()


def read_status(answer: object, url: str) -> Status:
    """The state of a server, from what its workers answered.

    Raises:
        ServerGone: If it is something else.
        ServerRefused: If the workers have another release's extension.
    """
    workers = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(workers, list) or not workers or not all(isinstance(worker, dict) for worker in workers):
        raise ServerGone(f"an answer without the workers' state: {str(answer)[:80]}")
    if any(worker.get("protocol") != PROTOCOL for worker in workers):
        raise ServerRefused(
            f"{url} has the worker extension of another release of grail-lightning. Install the "
            "trainer's there: pip install --no-deps grail-lightning==…",
            500,
        )
    versions = {worker.get("version") for worker in workers}
    return Status(
        instance=" ".join(str(worker.get("instance")) for worker in workers),
        version=versions.pop() if len(versions) == 1 else None,
        facts=workers[0],
        errors=tuple(str(error) for worker in workers if (error := worker.get("error") or worker.get("broken"))),
    )


def body_of(request: Request, pushed: Pushed) -> dict[str, Any]:
    """The JSON of a request. Keys and values in the prefix cache are told apart by the weights that computed them."""
    return {"prompt": request.prompt, **request.parameters, "return_token_ids": True, "cache_salt": pushed.version}


def gap_of_answers(before: Sequence[Completion], after: Sequence[Completion]) -> Gap:
    """The differences of log-probabilities between two answers to one probe, up to the first other token of a row."""
    kept: list[float] = []
    tokens = 0
    for one, other in zip(before, after, strict=True):
        gaps = [abs(mine - theirs) for mine, theirs in zip(one.logprobs, other.logprobs, strict=False)]
        pairs = enumerate(zip(one.ids, other.ids, strict=False))
        kept += gaps[: next((k for k, (mine, theirs) in pairs if mine != theirs), None)]
        tokens += len(gaps)
    # Rounding changes a token seldom; with other weights most rows begin otherwise.
    if 2 * len(kept) < tokens or not kept:
        return Gap(math.inf, math.inf, tokens)
    return Gap(sum(kept) / len(kept), max(kept), len(kept))


def read_completion(answer: Any) -> Completion:
    """The ids and log-probabilities of an answer to ``/v1/completions``.

    Raises:
        ServerGone: If it does not contain them.
    """
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(ids) == len(logprobs):
            return Completion([int(token) for token in ids], [float(value) for value in logprobs])
    except (KeyError, IndexError, TypeError, ValueError):
        pass
    raise ServerGone(f"an answer without token ids and log-probabilities: {str(answer)[:120]}")


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

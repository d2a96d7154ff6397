"""Sampling of rollouts turn by turn: what an engine offers to a loop in which an environment answers after each turn.

The ids of a rollout are only ever appended to. What was sampled is never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from grail_lightning.batch import Sampling
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.tasks.problem import Prompt, TokenText

if TYPE_CHECKING:
    from grail_lightning.engines.base import RolloutEngine


def on_any_rank(own: bool, engine: RolloutEngine, device: torch.device) -> bool:
    """Whether it is true on a rank: ranks that sample together play their turns together."""
    if engine.samples_elsewhere:  # It is perhaps called in a thread, where no collective may be.
        return own
    return bool(all_reduce(torch.tensor(int(own), device=device), "max"))


class TurnRequest(NamedTuple):
    """A rollout that is to be continued by one turn."""

    row: int  # The rollout's index in the batch, the same in every turn.
    prompt: Prompt  # The problem; its messages are not read.
    ids: list[int]  # All ids so far: the prompt, the turns before, and what the environment answered to them.
    limit: int  # Most tokens of the turn.
    seed: int  # 63 bits; the turn depends on these, its ids and the weights alone.
    stop: tuple[str, ...] = ()  # The strings that end the turn: tools of other tasks of the batch have other tags.


class SampledTurn(NamedTuple):
    """A turn as it was sampled."""

    ids: list[int]  # The end token or the tokens of a stop string included.
    logprobs: list[float] | None  # As many, if the engine reports them.
    finished: bool  # Whether the turn ended by itself within its limit.


TurnSampler = Callable[[Sequence[TurnRequest]], list[SampledTurn]]
"""Samples one turn for each request, in their order. Their rows rise; a row that is missing has ended.

One sampler samples the turns of the rollouts of one batch. Ranks that sample together call it equally often, some of
them perhaps without a request.
"""


def resend_turns(engine: RolloutEngine, sampling: Sampling, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
    """Sample turns with any engine, by one call of `generate_seeded` whose prompts are all tokens so far.

    With the first two arguments bound it is a `TurnSampler`. The call samples to the largest limit of its requests, and
    turns that exceed their own limit are cut. The stop strings of one request end the turns of all.
    """
    prompts = [replace(request.prompt, messages=TokenText("", request.ids)) for request in requests]
    longest = max((request.limit for request in requests), default=1)
    stops = tuple(dict.fromkeys(stop for request in requests for stop in request.stop))
    sampling = replace(sampling, max_response_length=longest, stop=stops)
    batch = engine.generate_seeded(prompts, 1, sampling, [request.seed for request in requests])
    turns = []
    for k, (request, length) in enumerate(zip(requests, batch.response_lengths.tolist(), strict=True)):
        own = slice(min(length, request.limit))
        logprobs = None if batch.sampling_logprobs is None else batch.sampling_logprobs[k][own].tolist()
        finished = bool(batch.finished[k]) and length <= request.limit
        turns.append(SampledTurn(batch.response_ids[k][own].tolist(), logprobs, finished))
    return turns

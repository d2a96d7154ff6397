"""What is asked of vLLM for a batch of rollouts, and how its answers become responses.

The parameters are those of `vllm.SamplingParams` and, with the same names, of the JSON of ``/v1/completions``. Token
ids go in and come out; nothing is tokenised again.

Shapes: ``n`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines.base import RolloutEngine, build_batch, check_room
from grail_lightning.engines.draw import Ending
from grail_lightning.policy import Policy
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.tasks.base import Prompt

_LEAST_TEMPERATURE = 0.01
_SEEDS = 2**63
_WINDOWS = 8192


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for: the token ids to continue, and `sampling_parameters`."""

    prompt: list[int]
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as vLLM reports it.

    Attributes:
        ids: The sampled ids, the end token included.
        logprobs: The log-probability of each id over the whole vocabulary, at the sampling temperature.
    """

    ids: list[int]
    logprobs: list[float]


Send = Callable[[Sequence[Request]], list[Completion]]
"""Sends requests to vLLM and returns the completions in the same order."""


def sample(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    send: Send,
    any_rank: Callable[[bool], bool] = bool,
) -> SampledBatch:
    """A batch of rollouts, see `RolloutEngine.generate`.

    Responses end by the rule of `grail_lightning.engines.draw`, as those of `HFEngine` do. vLLM finds stop strings in
    the text that it decodes by itself, which can differ at the borders of tokens: what it sampled beyond the end is cut
    off, and a response that it ended for no reason that the rule knows is continued, without stop strings.

    Where ranks must call `send` equally often, `any_rank` tells whether a claim holds on any of them.

    Raises:
        ValueError: If a prompt and the response limit exceed the model's positions, for a temperature that vLLM would
            replace, or if vLLM ends a response for a reason that is not known here.
    """
    encoded = [policy.encode(prompt.messages) for prompt in prompts]
    check_room(policy, encoded, sampling)
    rows = [ids for ids in encoded for _ in range(group_size)]
    requests = [
        Request(ids, sampling_parameters(sampling, policy.end_token_ids, own))
        for ids, own in zip(rows, seeds, strict=True)
    ]
    completions = send(requests)
    ending = Ending(policy, sampling)
    ends = first_ends(ending, [row.ids for row in completions])
    short = [
        k
        for k, (row, end) in enumerate(zip(completions, ends, strict=True))
        if end is None and _left(sampling, row) > 0
    ]
    if sampling.stop and any_rank(bool(short)):
        completions = _continued(requests, completions, short, sampling, send)
        ends = first_ends(ending, [row.ids for row in completions])
    for end, row in zip(ends, completions, strict=True):
        if end is None and _left(sampling, row):
            raise ValueError(
                f"vLLM ended a response after {len(row.ids)} of {sampling.max_response_length} tokens, without an end "
                "token or a stop string. Its `max_model_len` may be too small for the prompts; raise it."
            )
    return build_batch(
        policy,
        prompts,
        group_size,
        [row.ids[:end] for row, end in zip(completions, ends, strict=True)],
        [end is not None for end in ends],
        [row.logprobs[:end] for row, end in zip(completions, ends, strict=True)],
    )


def _left(sampling: Sampling, row: Completion) -> int:
    return sampling.max_response_length - len(row.ids)


def _continued(
    requests: Sequence[Request], completions: Sequence[Completion], short: Sequence[int], sampling: Sampling, send: Send
) -> list[Completion]:
    """The completions, where the rows `short` were sampled further, to an end token or to the length limit."""
    joined = list(completions)
    further = [
        Request(
            requests[k].prompt + completions[k].ids,
            {**requests[k].parameters, "max_tokens": _left(sampling, completions[k]), "stop": []},
        )
        for k in short
    ]
    for k, rest in zip(short, send(further), strict=True):
        joined[k] = Completion(completions[k].ids + rest.ids, completions[k].logprobs + rest.logprobs)
    return joined


class SeededEngine(RolloutEngine):
    """An engine that draws each row by a seed of its own; a batch's one seed gives each row one."""

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """See `RolloutEngine.generate`."""
        seeds = [row_seed(seed, row) for row in range(len(prompts) * group_size)]
        return self.generate_seeded(prompts, group_size, sampling, seeds)


def row_seed(seed: int, row: int) -> int:
    """The seed of one row of a batch, ``0 ≤ s < 2^63``.

    Rows have consecutive seeds, as vLLM gives them to the ``n`` responses of one request. It draws the tokens of a row
    from this seed alone, so they do not depend on the other rows, or on the server that samples them.
    """
    return (derive_seed("vllm", seed) + row) % _SEEDS


def sampling_parameters(sampling: Sampling, end_token_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """The parameters of one request. Every one that a server could replace by a default of the checkpoint is given.

    The policy's end tokens alone end a response, beside stop strings; the seed is from `row_seed`.
    """
    # vLLM would silently replace a lower temperature.
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"`temperature` must be 0 (greedy) or at least {_LEAST_TEMPERATURE} with vLLM, but got "
            f"{sampling.temperature}. Use 0."
        )
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.temperature else 1.0,
        "top_k": sampling.top_k if sampling.temperature else 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_response_length,
        "min_tokens": 0,
        "seed": seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(end_token_ids),
        # vLLM's own end tokens are those of the checkpoint; ours are `stop_token_ids`.
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,
    }


def first_ends(ending: Ending, rows: Sequence[Sequence[int]]) -> list[int | None]:
    """The number of tokens of each row up to the first one with which it ends by the rule; None if it does not."""
    ends = set(ending.end_tokens.tolist())
    by_token = [next((k for k, token in enumerate(row, start=1) if token in ends), None) for row in rows]
    if ending.stops is None:
        return by_token
    strings = _first_stops(ending, ending.stops, rows)
    return [min((end for end in pair if end is not None), default=None) for pair in zip(by_token, strings, strict=True)]


def _first_stops(
    ending: Ending, stops: Callable[[Tensor, None], Tensor], rows: Sequence[Sequence[int]]
) -> list[int | None]:
    """`first_ends` by stop strings alone. The rule reads the newest `reach` tokens, so windows of them suffice."""
    first: list[int | None] = [None] * len(rows)
    for length in range(1, ending.reach + 1):
        # Windows of one length: beginnings of rows that are shorter than the rule's reach, then all others.
        whole = length == ending.reach
        places = [
            (row, end)
            for row, ids in enumerate(rows)
            for end in (range(length, len(ids) + 1) if whole else (length,) * (len(ids) >= length))
        ]
        for k in range(0, len(places), _WINDOWS):
            part = places[k : k + _WINDOWS]
            windows = torch.tensor([rows[row][end - length : end] for row, end in part], dtype=torch.long)
            hits = stops(windows.to(ending.end_tokens.device), None).tolist()
            for (row, end), hit in zip(part, hits, strict=True):
                if hit and first[row] is None:
                    first[row] = end
    return first

"""What is asked of vLLM for a batch of rollouts, and how its answers become responses.

The parameters are those of `vllm.SamplingParams` and, with the same names, of the JSON of ``/v1/completions``. Token
ids go in and come out; nothing is tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grail_lightning.core.engines.base import SampledTurn, TurnRequest, build_batch, check_room
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import SampledBatch, Sampling
from grail_lightning.core.runtime.seeds import derive_seed

_LEAST_TEMPERATURE = 0.01
_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for."""

    prompt: list[int]  # The token ids to continue.
    parameters: dict[str, Any]  # See `sampling_parameters`.


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as vLLM reports it."""

    ids: list[int]  # The sampled ids, the end token or those of the stop string included.
    # The log-probability of each id over the whole vocabulary, at the sampling temperature; NaN if there is none.
    logprobs: list[float]
    reason: str  # For which it ended: "stop" for an end token or a stop string, "length" for the limit.


_Send = Callable[[Sequence[Request]], list[Completion]]
"""Sends requests to vLLM and returns the completions in the same order."""


def sample(
    policy: Policy, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int], send: _Send
) -> SampledBatch:
    """A batch of rollouts, see `RolloutEngine.generate_seeded`."""
    rows = [ids for prompt in prompts for ids in [policy.encode(prompt.messages)] * group_size]
    completions, finished = _complete(policy, rows, [sampling] * len(rows), seeds, send)
    ids, logprobs = [row.ids for row in completions], [row.logprobs for row in completions]
    return build_batch(policy, prompts, group_size, ids, finished, logprobs)


def sample_turns(policy: Policy, sampling: Sampling, send: _Send, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
    """Sample turns with vLLM, each up to a limit of its own; its prefix cache holds what earlier turns have read.

    With the first three arguments bound it is a `TurnSampler`.
    """
    limited = [replace(sampling, max_response_length=r.limit, stop=r.stop) for r in requests]
    rows, seeds = [request.ids for request in requests], [request.seed for request in requests]
    completions, finished = _complete(policy, rows, limited, seeds, send)
    return [SampledTurn(row.ids, row.logprobs, end) for row, end in zip(completions, finished, strict=True)]


def _complete(
    policy: Policy, rows: Sequence[list[int]], sampling: Sequence[Sampling], seeds: Sequence[int], send: _Send
) -> tuple[list[Completion], list[bool]]:
    """A completion of each row, and whether it ended by itself."""
    for ids, limited in zip(rows, sampling, strict=True):
        check_room(policy, [ids], limited)
    completions = send(
        [
            Request(ids, sampling_parameters(limited, policy.end_token_ids, seed))
            for ids, limited, seed in zip(rows, sampling, seeds, strict=True)
        ]
    )
    # An end token may be the last one that the limit allows, for which the reason may be the limit.
    finished = [row.reason == "stop" or row.ids[-1:] in ([end] for end in policy.end_token_ids) for row in completions]
    for ended, row, limited in zip(finished, completions, sampling, strict=True):
        if not ended and len(row.ids) < limited.max_response_length:
            raise ValueError(
                f"vLLM ended a response after {len(row.ids)} of {limited.max_response_length} tokens ({row.reason}), "
                "without an end token or a stop string. Its `max_model_len` may be too small for the prompts; raise it."
            )
    return completions, finished


def row_seeds(seed: int, rows: int) -> list[int]:
    """The seed of each row of a batch, ``0 ≤ s < 2^63``, from which alone vLLM draws the row's tokens."""
    first = derive_seed("vllm", seed)
    return [(first + row) % _SEEDS for row in range(rows)]


def sampling_parameters(sampling: Sampling, end_token_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """The parameters of one request. Every one that a server could replace by a default of the checkpoint is given.

    The policy's end tokens alone end a response, beside stop strings, which vLLM looks for in the text that it decodes.
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

"""The probe: do the sampler and the trainer compute the same log-probabilities of the same tokens?

Most mistakes of a second copy of the weights show here and nowhere else: weights of an earlier step or of another
checkpoint, another dtype, a temperature that was applied once instead of twice, log-probabilities after top-k.

Shapes: ``n`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grail_lightning.batch import Sampling, pad_left
from grail_lightning.engines.vllm.requests import Completion, Request, row_seed, sampling_parameters
from grail_lightning.policy import Policy

_TEXT = "Ana has 12 pens and buys 5 more. How many pens does she have? Think step by step."
_SPREAD_TOKENS = 24
_RESPONSE_TOKENS = 16
_GROUP = 4
_KINDS = (
    Sampling(max_response_length=_RESPONSE_TOKENS),
    Sampling(max_response_length=_RESPONSE_TOKENS, temperature=0.7, top_p=0.9, top_k=20),
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far the log-probabilities of sampler and trainer may differ, in nats.

    Attributes:
        mean: Bound of the mean of the absolute differences.
        largest: Bound of the largest one.

    Raises:
        ValueError: If one is not positive.
    """

    mean: float
    largest: float

    def __post_init__(self) -> None:
        for name in ("mean", "largest"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`bound.{name}` must be positive, but got {getattr(self, name)}.")


EXACT, ROUNDED = Bound(mean=1e-4, largest=1e-3), Bound(mean=0.12, largest=2.0)
"""Bounds where sampler and trainer compute in float32, and where one of them computes in half precision."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The mean and the largest absolute difference that a probe found, in nats, and the number of its tokens."""

    mean: float
    largest: float
    tokens: int


def default_bound(*dtypes: torch.dtype) -> Bound:
    """The bound for a sampler and a trainer that compute in these dtypes."""
    return EXACT if all(dtype in (torch.float32, torch.float64) for dtype in dtypes) else ROUNDED


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as options have it."""
    return str(dtype).removeprefix("torch.")


def probe_requests(policy: Policy) -> list[Request]:
    """Requests for a few tokens after two prompts: a text, and ids from all over the vocabulary.

    Half of them are drawn at temperature 1 and half at another one with top-k and top-p, whatever the run samples with.
    They run to their length limit.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    spread = torch.linspace(0, vocabulary - 1, min(_SPREAD_TOKENS, vocabulary)).long().tolist()
    prompts = [policy.encode([{"role": "user", "content": _TEXT}] if policy.tokenizer.chat_template else _TEXT), spread]
    return [
        Request(prompt, sampling_parameters(kind, (), row_seed(_GROUP * k, row)))
        for k, kind in enumerate(_KINDS)
        for prompt in prompts
        for row in range(_GROUP)
    ]


@torch.no_grad()
def measure_gap(policy: Policy, requests: Sequence[Request], completions: Sequence[Completion]) -> Gap:
    """The difference of the sampler's log-probabilities to those of the policy, in its present precision.

    Every rank makes the same number of forward passes, so sharded weights may be used.
    """
    for request, row in zip(requests, completions, strict=True):
        if not len(row.ids) == len(row.logprobs) == request.parameters["max_tokens"]:
            raise ValueError(
                f"vLLM must answer the probe with {request.parameters['max_tokens']} tokens and as many "
                f"log-probabilities, but got {len(row.ids)} and {len(row.logprobs)}. Look at its log."
            )
    differences = []
    with policy.evaluating():
        for temperature in sorted({request.parameters["temperature"] for request in requests}):
            places = [k for k, request in enumerate(requests) if request.parameters["temperature"] == temperature]
            sampled = torch.tensor([completions[k].logprobs for k in places], dtype=torch.float64)
            rows = _rows(policy, [requests[k].prompt for k in places], [completions[k].ids for k in places])
            trained = policy(policy.layout(rows), temperature=temperature).logprobs
            differences.append((trained.double().cpu() - sampled).abs().flatten())
    every = torch.cat(differences)
    return Gap(float(every.mean()), float(every.max()), len(every))


def describe_gap(gap: Gap, dtypes: str) -> str:
    """What the first probe found, as a sentence."""
    return (
        f"Log-probabilities of sampler and trainer differ by {gap.mean:.2g} nats on average and {gap.largest:.2g} at "
        f"most over {gap.tokens} tokens ({dtypes})."
    )


def check_gap(gap: Gap, bound: Bound, *, engine: str, dtypes: str, since: str) -> None:
    """Check that sampler and trainer agree within a bound; the other arguments are for the message.

    Raises:
        ValueError: If they do not.
    """
    # Undefined differences are never within a bound.
    if gap.mean <= bound.mean and gap.largest <= bound.largest:
        return
    raise ValueError(
        f"`{engine}` and the trainer must agree on the log-probabilities of {gap.tokens} probe tokens {since}, within "
        f"{bound.mean:g} nats on average and {bound.largest:g} at most, but they differ by {gap.mean:.3g} on average "
        f"and by up to {gap.largest:.3g} ({dtypes}). Likely causes: weights that are not those of the policy (of an "
        "earlier step, of another model, or pushed in part), another dtype, another temperature, or a server without "
        "--logprobs-mode processed_logprobs. Nothing was trained on such rollouts. If only roundings differ, raise "
        "`engine.bound`, or compute in float32."
    )


class _Rows(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor


def _rows(policy: Policy, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> _Rows:
    """Prompts and responses of equal length as the tensors of a layout."""
    prompt_ids, prompt_mask = pad_left(prompts, policy.tokenizer.pad_token_id)
    response_ids = torch.tensor(responses, dtype=torch.long)
    response_mask = torch.ones_like(response_ids, dtype=torch.bool)
    tensors = torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, response_mask], 1), response_mask
    return _Rows(*(tensor.to(policy.device) for tensor in tensors))

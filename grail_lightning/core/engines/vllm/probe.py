"""The probe: do the sampler and the trainer compute the same log-probabilities of the same tokens?

Most mistakes of a second copy of the weights show here and nowhere else: weights of an earlier step or of another
checkpoint, another dtype, a temperature that was applied once instead of twice, log-probabilities after top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.core.engines.checks import check_reported
from grail_lightning.core.engines.requests import Completion, Request, row_seeds, sampling_parameters
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import Sampling, pad_left

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
    """

    mean: float
    largest: float


_EXACT, _ROUNDED = Bound(mean=1e-4, largest=1e-3), Bound(mean=0.12, largest=2.0)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as options have it."""
    return str(dtype).removeprefix("torch.")


def probe_requests(policy: Policy) -> list[Request]:
    """Requests for a few tokens, at two temperatures, after a text and after ids from all over the vocabulary."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    # The dtype is given, since with `bf16-true` the default one rounds the last id up to one beyond the vocabulary.
    spread = torch.linspace(0, vocabulary - 1, min(_SPREAD_TOKENS, vocabulary), dtype=torch.float64).long().tolist()
    prompts = [policy.encode([{"role": "user", "content": _TEXT}] if policy.tokenizer.chat_template else _TEXT), spread]
    return [
        Request(prompt, sampling_parameters(kind, (), seed))
        for k, kind in enumerate(_KINDS)
        for prompt in prompts
        for seed in row_seeds(_GROUP * k, _GROUP)
    ]


def check_probe(
    policy: Policy,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    *,
    engine: str,
    dtype: torch.dtype,
    bound: Bound | None,
    since: str,
) -> str:
    """Check that sampler and trainer agree on the log-probabilities of `probe_requests`, and tell how far.

    `engine` computes in `dtype`; `since` names the moment in messages. Without a bound it is that of the coarser dtype.
    Every rank makes the same number of forward passes, so sharded weights may be used.
    """
    wanted = [request.parameters["max_tokens"] for request in requests]
    got = [len(answer.ids) for answer in completions]
    if wanted != got:
        raise ValueError(
            f"`{engine}` must answer the {len(wanted)} probes {since} with {wanted[0]} tokens each, but gave {got}. "
            "Take out what ends responses earlier from its options, or from those of its server."
        )
    missing = sum(math.isnan(logprob) for answer in completions for logprob in answer.logprobs)
    check_reported(engine, missing, sum(got))
    differences = _differences(policy, requests, completions)
    mean, largest = float(differences.mean()), float(differences.max())
    dtypes = f"sampler in {dtype_name(dtype)}, trainer in {dtype_name(policy.compute_dtype)}"
    exact = {dtype, policy.compute_dtype} <= {torch.float32, torch.float64}
    bound = bound or (_EXACT if exact else _ROUNDED)
    # Undefined differences are never within a bound.
    if mean <= bound.mean and largest <= bound.largest:
        return (
            f"Log-probabilities of sampler and trainer differ by {mean:.2g} nats on average and {largest:.2g} at most "
            f"over {len(differences)} tokens ({dtypes})."
        )
    raise ValueError(
        f"`{engine}` and the trainer must agree on the log-probabilities of {len(differences)} probe tokens {since}, "
        f"within {bound.mean:g} nats on average and {bound.largest:g} at most, but they differ by {mean:.3g} on "
        f"average and by up to {largest:.3g} ({dtypes}). Likely causes: weights that are not those of the policy (of "
        "an earlier step, of another model, or pushed in part), another dtype, another temperature, or a server "
        "without --logprobs-mode processed_logprobs. If only roundings differ, "
        "raise `engine.bound`, or compute in float32."
    )


@torch.no_grad()
def _differences(policy: Policy, requests: Sequence[Request], completions: Sequence[Completion]) -> Tensor:
    differences = []
    with policy.evaluating():
        for temperature in sorted({request.parameters["temperature"] for request in requests}):
            places = [k for k, request in enumerate(requests) if request.parameters["temperature"] == temperature]
            sampled = torch.tensor([completions[k].logprobs for k in places], dtype=torch.float64)
            prompts, prompt_mask = pad_left([requests[k].prompt for k in places], policy.tokenizer.pad_token_id)
            responses = torch.tensor([completions[k].ids for k in places])
            mask = torch.ones_like(responses, dtype=torch.bool)
            tensors = torch.cat([prompts, responses], 1), torch.cat([prompt_mask, mask], 1), mask
            layout = padded_layout(*(tensor.to(policy.device) for tensor in tensors))
            trained: Tensor = policy(layout, temperature=temperature)
            differences.append((trained.double().cpu() - sampled)[~sampled.isnan()].abs())
    return torch.cat(differences)

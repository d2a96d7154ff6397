"""Checks of the batch that an engine returns, since users can write their own engines.

Shapes: ``B = prompts × group_size`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling, lengths_to_mask
from grail_lightning.engines.base import RolloutEngine
from grail_lightning.policy import Policy
from grail_lightning.runtime.checks import Claim, Kind, check_claims, check_tensor
from grail_lightning.tasks.base import Prompt

_REMEDY = "`grail_lightning.engines.build_batch` assembles what is asked for."


def check_logprobs(engine: RolloutEngine, sampler_cap: float | None, *, reports: bool) -> None:
    """Check that the engine reports the log-probabilities that the update needs.

    Raises:
        ValueError: If it does not, and the correction for the sampler is on.
    """
    if sampler_cap is not None and not reports:
        raise ValueError(
            "`execution.sampler_cap` needs the log-probabilities of the sampler, but "
            f"`{type(engine).__name__}` reports none. Use an engine that does, or set it to null (auto is 2 for "
            "engines with a copy of the weights)."
        )


def check_rollouts(
    engine: RolloutEngine,
    batch: object,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
) -> None:
    """Check that these are the rollouts that were requested of an engine; synchronises with the device once.

    The arguments are those of `RolloutEngine.generate`, and what it returned for them.

    Raises:
        ValueError: If it is no `SampledBatch`; if rows are not in the order of the prompts; if a tensor has the wrong
            dtype, shape or device; or if masks, ids or log-probabilities are not as `SampledBatch` describes them.
    """
    must = f"`{type(engine).__name__}.generate` must return"
    if not isinstance(batch, SampledBatch):
        raise ValueError(f"{must} a `SampledBatch`, but got {type(batch).__name__}. {_REMEDY}")
    rows = len(prompts) * group_size
    for field, values in (("prompts", batch.prompts), ("texts", batch.texts)):
        if not isinstance(values, list) or len(values) != rows:
            got = len(values) if isinstance(values, list) else type(values).__name__
            raise ValueError(f"{must} `{field}` as a list of {rows}, one a row, but got {got}. {_REMEDY}")
    for row, (given, text) in enumerate(zip(batch.prompts, batch.texts, strict=True)):
        asked = prompts[row // group_size]
        if given is not asked and given.messages != asked.messages:
            raise ValueError(
                f"{must} the rows of each prompt side by side, in the order of the prompts, but got "
                f"{str(given.messages)[:80]!r} in row {row}, for {str(asked.messages)[:80]!r}. {_REMEDY}"
            )
        if not isinstance(text, str):
            raise ValueError(f"{must} strings as `texts`, but got {type(text).__name__} in row {row}. {_REMEDY}")
    _check_forms(must, batch, rows, policy.device)
    if rows:
        vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        check_claims(
            _claims_of_masks(must, batch, group_size, sampling) + _claims_of_tokens(must, batch, vocabulary), _REMEDY
        )


def _check_forms(must: str, batch: SampledBatch, rows: int, device: torch.device) -> None:
    """Check dtype, shape and device of the tensors of a batch."""
    width, length = (_width(ids) for ids in (batch.input_ids, batch.response_ids))
    forms: list[tuple[str, Kind, tuple[int, ...]]] = [
        ("input_ids", "integer", (rows, width)),
        ("attention_mask", "bool", (rows, width)),
        ("response_ids", "integer", (rows, length)),
        ("response_mask", "bool", (rows, length)),
        ("group", "integer", (rows,)),
        ("row", "integer", (rows,)),
        ("finished", "bool", (rows,)),
    ]
    if batch.sampling_logprobs is not None:
        forms.append(("sampling_logprobs", "floating-point", (rows, length)))
    for field, kind, shape in forms:
        check_tensor(f"{must} `{field}`", getattr(batch, field), kind, shape, device)
    if rows and width <= length:
        raise ValueError(
            f"{must} `input_ids` of prompts and responses, but got {width} columns beside `response_ids` of {length}. "
            f"{_REMEDY}"
        )


def _width(ids: object) -> int:
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim else 0


def _claims_of_masks(must: str, batch: SampledBatch, group_size: int, sampling: Sampling) -> list[Claim]:
    """Claims about the order of the rows, and about the padding of prompts and responses."""
    prompt, response = batch.attention_mask[:, : batch.prompt_width], batch.response_mask
    number = torch.arange(len(batch), device=response.device)
    right = lengths_to_mask(batch.response_lengths, response.shape[1])
    left = lengths_to_mask(batch.prompt_lengths.clamp(min=1), prompt.shape[1]).flip(1)
    late = torch.arange(response.shape[1], device=response.device) >= sampling.max_response_length
    order = f"a `group` for each prompt, numbered from 0 and of {group_size} neighbours"
    return [
        Claim(f"{must} rows that `row` numbers from 0", batch.row != number, batch.row),
        Claim(f"{must} {order}", batch.group != number // group_size, batch.group),
        Claim(f"{must} a `response_mask` padded on the right", response != right, response),
        Claim(f"{must} an `attention_mask` with prompts padded on the left", prompt != left, prompt),
        Claim(
            f"{must} an `attention_mask` that ends with the `response_mask`",
            batch.attention_mask[:, batch.prompt_width :] != response,
            response,
        ),
        Claim(f"{must} responses of at most {sampling.max_response_length} tokens", response & late, response),
    ]


def _claims_of_tokens(must: str, batch: SampledBatch, vocabulary: int) -> list[Claim]:
    """Claims that the policy's vocabulary contains the ids and that log-probabilities are at most 0."""
    mask, ends = batch.response_mask, batch.input_ids[:, batch.prompt_width :]
    claims = [
        Claim(
            f"{must} `{field}` from 0 to {vocabulary - 1}, the policy's vocabulary",
            (ids < 0) | (ids >= vocabulary),
            ids,
        )
        for field, ids in (("input_ids", batch.input_ids), ("response_ids", batch.response_ids))
    ]
    differs = (ends != batch.response_ids) & mask
    claims.append(Claim(f"{must} `input_ids` that end with the `response_ids`", differs, ends))
    if (logprobs := batch.sampling_logprobs) is not None:
        # A logit of 100 and its normaliser have this rounding error, so a probability may be slightly above 1.
        rounding = 100 * torch.finfo(logprobs.dtype).eps
        wrong = mask & ~(logprobs.isfinite() & (logprobs <= rounding))
        claims.append(Claim(f"{must} finite `sampling_logprobs` of at most 0", wrong, logprobs))
    return claims

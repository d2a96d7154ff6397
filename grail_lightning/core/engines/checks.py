"""Checks of the batch that an engine returns, since users can write their own engines.

Shapes: ``B = prompts × group_size`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from grail_lightning.core.engines.base import RolloutEngine
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading
from grail_lightning.core.policy.vision import PictureTokens
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import SampledBatch, Sampling, lengths_to_mask
from grail_lightning.core.runtime.checks import Claim, Kind, check_claims, check_tensor

_MOST_MISSING = 0.01  # The share of tokens for which a sampler may report no log-probability.
_REMEDY = "`grail_lightning.core.engines.base.build_batch` assembles what is asked for."


def check_logprobs(engine: RolloutEngine, sampler_cap: float | None, *, reports: bool) -> None:
    """Check that the engine reports the log-probabilities that the correction for the sampler needs, if it is on."""
    if sampler_cap is not None and not reports:
        raise ValueError(
            "`execution.sampler_cap` needs the log-probabilities of the sampler, but "
            f"`{type(engine).__name__}` reports none. Use an engine that does, or set it to null (auto is 2 for "
            "engines with a copy of the weights)."
        )


def check_draws(sampling: Sampling) -> None:
    """Check that training samples at random: the rollouts of a group would be equal, and none have an advantage."""
    greedy = [f"`sampling.temperature` {sampling.temperature:g}"] * (sampling.temperature == 0)
    greedy += [f"`sampling.top_k` {sampling.top_k}"] * (sampling.top_k == 1)
    if greedy:
        raise ValueError(
            "Training must sample at random, so that the rollouts of a group differ and have advantages, but got "
            f"{' and '.join(greedy)}, with which each token is the most likely one. Set `sampling.temperature` to 1 "
            "and `sampling.top_k` to 0; `evaluation.sampling` may be greedy."
        )


def check_takes_pictures(engine: RolloutEngine, loading: Loading, ranks: int) -> None:
    """Check that prompts may have pictures."""
    if not engine.takes_pictures:
        raise ValueError(
            f"`{type(engine).__name__}` does not sample from prompts with pictures. Use HFEngine, or leave them out."
        )
    if loading.train_vision and ranks > 1:
        raise ValueError(f"`loading.train_vision` must be false on {ranks} ranks, of which one may have no picture.")


def check_rollouts(
    engine: RolloutEngine,
    batch: object,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
) -> None:
    """Check that these are the rollouts that were requested of an engine; synchronises with the device once."""
    must = f"`{type(engine).__name__}.generate` must return"
    if not isinstance(batch, SampledBatch):
        raise ValueError(f"{must} a `SampledBatch`, but got {type(batch).__name__}. {_REMEDY}")
    rows = len(prompts) * group_size
    for field, values in (("prompts", batch.prompts), ("texts", batch.texts), ("episodes", batch.episodes)):
        if values is not None and len(values) != rows:
            raise ValueError(f"{must} `{field}` as a list of {rows}, one a row, but got {len(values)}. {_REMEDY}")
    for row, row_prompt in enumerate(batch.prompts):
        prompt = prompts[row // group_size]
        if batch.episodes is None and row_prompt is not prompt and row_prompt.messages != prompt.messages:
            raise ValueError(
                f"{must} the rows of each prompt side by side, in the order of the prompts, but got "
                f"{str(row_prompt.messages)[:80]!r} in row {row}, for {str(prompt.messages)[:80]!r}. {_REMEDY}"
            )
    for field, kind, shape in _forms(batch, rows):
        check_tensor(f"{must} `{field}`", getattr(batch, field), kind, shape, policy.device)
    if rows and not batch.response_ids.shape[1]:
        raise ValueError(f"{must} one token of a response at least, but got none. {_REMEDY}")
    if rows:
        vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        pictures = None if policy.vision is None else policy.vision.pictures
        claims = [*_claims_of_masks(batch, group_size, sampling), *_claims_of_tokens(batch, vocabulary, pictures)]
        check_claims([claim._replace(text=f"{must} {claim.text}") for claim in claims], _REMEDY)
        if batch.sampling_logprobs is not None:
            sampled = batch.sampling_logprobs[batch.response_mask]
            check_reported(type(engine).__name__, int(sampled.isnan().sum()), len(sampled))


def check_reported(sampler: str, missing: int, tokens: int) -> None:
    """Check that a sampler has reported the log-probabilities of its tokens, of all but 1 % or of all but one.

    A missing one is NaN: such a token is trained on as if sampler and trainer agreed about it.
    """
    if missing > max(1, _MOST_MISSING * tokens):
        raise ValueError(
            f"`{sampler}` must report the log-probability of each token that it samples, but gave none (null or NaN) "
            f"for {missing:,} of {tokens:,} tokens. Up to 1 % are trained on with a ratio of 1. Look at the sampler: "
            "sampled again, the same tokens would lack theirs."
        )


def _forms(batch: SampledBatch, rows: int) -> list[tuple[str, Kind, tuple[int, ...]]]:
    """The names of the tensors of a batch, with the kind and shape that they must have."""
    whole, length = (
        int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim else 0
        for ids in (batch.input_ids, batch.response_ids)
    )
    width = max(whole, length + (rows > 0))  # A prompt has one token at least.
    forms: list[tuple[str, Kind, tuple[int, ...]]] = [
        ("input_ids", "integer", (rows, width)),
        ("attention_mask", "bool", (rows, width)),
        ("response_ids", "integer", (rows, length)),
        ("response_mask", "bool", (rows, length)),
        ("group", "integer", (rows,)),
        ("row", "integer", (rows,)),
        ("finished", "bool", (rows,)),
        ("sampling_logprobs", "floating-point", (rows, length)),
        ("turn", "integer", (rows, length)),
    ]
    absent = [name for name in ("sampling_logprobs", "turn") if getattr(batch, name) is None]
    return [form for form in forms if form[0] not in absent]


def _claims_of_masks(batch: SampledBatch, group_size: int, sampling: Sampling) -> list[Claim]:
    """Claims about the order of the rows, and about the padding of prompts and responses."""
    prompt, response = batch.attention_mask[:, : batch.prompt_width], batch.response_mask
    number, valid = torch.arange(len(batch), device=response.device), batch.valid_mask
    left = lengths_to_mask(batch.prompt_lengths.clamp(min=1), prompt.shape[1]).flip(1)
    right = lengths_to_mask(batch.valid_lengths, valid.shape[1])
    late = response.cumsum(1) > sampling.max_response_length
    order = f"a `group` for each prompt, numbered from 0 and of {group_size} neighbours"
    claims = [
        Claim("rows that `row` numbers from 0", batch.row != number, batch.row),
        Claim(order, batch.group != number // group_size, batch.group),
        Claim("an `attention_mask` with prompts padded on the left", prompt != left, prompt),
        Claim("an `attention_mask` with the tokens after the prompt padded on the right", valid != right, valid),
        Claim(f"responses of at most {sampling.max_response_length} tokens", response & late, response),
    ]
    if (turn := batch.turn) is None:
        return [*claims, Claim("an `attention_mask` that ends with the `response_mask`", valid != response, response)]
    falls = F.pad(turn[:, 1:] < turn[:, :-1], (1, 0)) & valid
    return [
        *claims,
        Claim("a `response_mask` within the `attention_mask`", response & ~valid, response),
        Claim("numbers of a `turn` from 0", (turn < 0) & valid, turn),
        Claim("numbers of a `turn` that do not fall", falls, turn),
    ]


def _claims_of_tokens(batch: SampledBatch, vocabulary: int, pictures: PictureTokens | None) -> list[Claim]:
    """Claims that the policy's vocabulary contains the ids and that log-probabilities are at most 0."""
    mask, ends = batch.response_mask, batch.input_ids[:, batch.prompt_width :]
    sampled = torch.nn.functional.pad(mask, (batch.prompt_width, 0))
    claims = []
    for field, ids, field_mask in (("input_ids", batch.input_ids, sampled), ("response_ids", batch.response_ids, mask)):
        # Tokens of pictures are beyond it, and nobody samples them.
        beyond = (ids >= vocabulary) & (field_mask | ~pictures.known(ids) if pictures else True)
        claims.append(Claim(f"`{field}` from 0 to {vocabulary - 1}, the policy's vocabulary", (ids < 0) | beyond, ids))
    differ = (ends != batch.response_ids) & batch.valid_mask
    claims.append(Claim("`input_ids` that end with the `response_ids`", differ, ends))
    if (logprobs := batch.sampling_logprobs) is not None:
        # A logit of 100 and its normaliser have this rounding error, so a probability may be slightly above 1.
        rounding = 100 * torch.finfo(logprobs.dtype).eps
        wrong = mask & ~logprobs.isnan() & ~(logprobs.isfinite() & (logprobs <= rounding))
        claims.append(Claim("finite `sampling_logprobs` (NaN for none) of at most 0", wrong, logprobs))
    return claims

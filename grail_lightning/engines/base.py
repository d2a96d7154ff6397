"""What samples: prompts in, rollouts out.

Shapes: ``B = prompts × group_size`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grail_lightning.checks import Claim, Kind, check_claims, check_tensor
from grail_lightning.policy import Policy
from grail_lightning.rollout import Prompt, RolloutBatch, Sampling, lengths_to_mask, pad_left


class RolloutEngine(ABC):
    """Draws responses. Sampled ids are kept as they are; nothing is re-tokenised.

    `check_rollouts` says what `generate` may return; `build_batch` assembles it.
    """

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> RolloutBatch:
        """`group_size` responses to each prompt; rows of one prompt are neighbours.

        The result is a function of the weights and the arguments: the global random state is neither read nor moved.
        """

    @abstractmethod
    def update_weights(self, policy: Policy) -> None:
        """Sample with the weights that `policy` has now."""


REMEDY = "`grail_lightning.engines.build_batch` assembles what is asked for."


def sample_rollouts(
    engine: RolloutEngine, policy: Policy, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int
) -> RolloutBatch:
    """What an engine draws, checked by `check_rollouts`: it may be anybody's."""
    batch = engine.generate(prompts, group_size, sampling, seed)
    check_rollouts(engine, batch, policy, prompts, group_size, sampling)
    return batch


def check_rollouts(
    engine: RolloutEngine,
    batch: Any,
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
) -> None:
    """Whether these are the rollouts that an engine was asked for; waits for the device once.

    Args:
        engine: The engine that returned them, for the message.
        batch: What its `generate` returned for the arguments that follow.
        policy: Its vocabulary and device.
        prompts: As for `RolloutEngine.generate`.
        group_size: Likewise.
        sampling: Likewise.

    Raises:
        ValueError: If it is no `RolloutBatch`; if rows are not in the order of the prompts; if a tensor is not of the
            right dtype, shape and device; or if masks, ids or log-probabilities are not as `RolloutBatch` has them.
    """
    must = f"`{type(engine).__name__}.generate` must return"
    if not isinstance(batch, RolloutBatch):
        raise ValueError(f"{must} a `RolloutBatch`, but got {type(batch).__name__}. {REMEDY}")
    rows = len(prompts) * group_size
    for field, values in (("prompts", batch.prompts), ("texts", batch.texts)):
        if not isinstance(values, list) or len(values) != rows:
            got = len(values) if isinstance(values, list) else type(values).__name__
            raise ValueError(f"{must} `{field}` as a list of {rows}, one a row, but got {got}. {REMEDY}")
    for row, (given, text) in enumerate(zip(batch.prompts, batch.texts, strict=True)):
        asked = prompts[row // group_size]
        if given is not asked and given.messages != asked.messages:
            raise ValueError(
                f"{must} the rows of each prompt side by side, in the order of the prompts, but got "
                f"{str(given.messages)[:80]!r} in row {row}, for {str(asked.messages)[:80]!r}. {REMEDY}"
            )
        if not isinstance(text, str):
            raise ValueError(f"{must} strings as `texts`, but got {type(text).__name__} in row {row}. {REMEDY}")
    _check_forms(must, batch, rows, policy.device)
    if rows:
        vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        check_claims(
            _claims_of_masks(must, batch, group_size, sampling) + _claims_of_tokens(must, batch, vocabulary), REMEDY
        )


def _check_forms(must: str, batch: RolloutBatch, rows: int, device: torch.device) -> None:
    """Dtypes, shapes and device of the tensors that an engine fills in."""
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
            f"{REMEDY}"
        )


def _width(ids: Any) -> int:
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.ndim else 0


def _claims_of_masks(must: str, batch: RolloutBatch, group_size: int, sampling: Sampling) -> list[Claim]:
    """The order of the rows, and where prompts and responses are padded."""
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


def _claims_of_tokens(must: str, batch: RolloutBatch, vocabulary: int) -> list[Claim]:
    """Ids that the policy knows, and log-probabilities that can be some."""
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
        # A logit of 100 and its normaliser are rounded to this much, so that a probability may come out above 1.
        rounding = 100 * torch.finfo(logprobs.dtype).eps
        wrong = mask & ~(logprobs.isfinite() & (logprobs <= rounding))
        claims.append(Claim(f"{must} finite `sampling_logprobs` of at most 0", wrong, logprobs))
    return claims


def build_batch(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    responses: list[list[int]],
    finished: list[bool],
    sampling_logprobs: list[list[float]] | None = None,
) -> RolloutBatch:
    """Assemble a batch from sampled ids; for engines.

    Args:
        policy: Encodes the prompts and decodes the responses.
        prompts: ``B / group_size`` of them.
        group_size: Responses of each prompt.
        responses: ``B`` lists of sampled ids, the end token included.
        finished: ``B``: whether each ended by itself.
        sampling_logprobs: ``B`` lists as long as the responses.
    """
    pad = policy.tokenizer.pad_token_id
    encoded = [ids for prompt in prompts for ids in [policy.encode(prompt.messages)] * group_size]
    prompt_ids, prompt_mask = pad_left(encoded, pad)
    lengths = torch.tensor([len(ids) for ids in responses], dtype=torch.long)
    width = int(lengths.max()) if len(lengths) else 0
    response_mask = lengths_to_mask(lengths, width)
    response_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in responses], dtype=torch.int32)
    response_ids = response_ids.reshape(len(responses), width)
    return RolloutBatch(
        input_ids=torch.cat([prompt_ids.int(), response_ids], 1),
        attention_mask=torch.cat([prompt_mask, response_mask], 1),
        response_ids=response_ids,
        response_mask=response_mask,
        group=torch.arange(len(prompts)).repeat_interleave(group_size),
        row=torch.arange(len(responses)),
        finished=torch.tensor(finished, dtype=torch.bool),
        prompts=[prompt for prompt in prompts for _ in range(group_size)],
        texts=[decode(policy, ids) for ids in responses],
        sampling_logprobs=_right_padded(sampling_logprobs, width),
    ).to(policy.device)


def given_batch(policy: Policy, prompts: Sequence[Prompt]) -> RolloutBatch:
    """Responses that are there already, in the column `response` of each prompt; one a prompt."""
    texts = [str(prompt.columns["response"]) for prompt in prompts]
    ids = [list(policy.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return build_batch(policy, prompts, 1, ids, [True] * len(ids))


def decode(policy: Policy, ids: list[int]) -> str:
    """The text that is graded: special tokens left out, nothing cleaned up."""
    text: str = policy.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _right_padded(rows: list[list[float]] | None, width: int) -> Tensor | None:
    if rows is None:
        return None
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float32).reshape(
        len(rows), width
    )

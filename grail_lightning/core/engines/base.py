"""The interface of rollout engines, functions that assemble batches, and sampling turn by turn.

Shapes: ``B = prompts × group_size`` rows, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading, PolicySource, positions
from grail_lightning.core.records.episode import one_turn, read_episode
from grail_lightning.core.records.task import Prompt, TokenText, response_group
from grail_lightning.core.rollout.batch import SampledBatch, Sampling, lengths_to_mask, pad_left
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.runtime.seeds import derive_seed


class RolloutEngine(ABC):
    """A class that samples responses. The sampled ids are kept unchanged; nothing is re-tokenised.

    `core.engines.checks.check_rollouts` lists what `generate` may return; `build_batch` assembles it. The
    arguments of the constructor become options: ``--model.engine=package.module.Name --model.engine.option=value``.

    Attributes:
        copies_weights: Whether the engine samples with a copy of the weights, which `update_weights` makes. If not, it
            calls the policy itself: sharded weights (FSDP2) are then whole on every rank while it samples. With a copy
            `update_weights` gathers sharded weights by itself on all ranks in step, and returns when the copy is
            complete; the log-probabilities of sampler and trainer may differ, which `execution.sampler_cap` corrects
            for by default. The correction needs those of the sampler.
        reports_logprobs: Whether `generate` returns the log-probabilities of the sampled tokens. An engine that cannot
            says False; a run that needs them then ends before anything is sampled.
        samples_elsewhere: Whether that copy is on another machine or in another process. With `execution.sample_ahead`
            `generate` then runs in a thread while the policy trains. It must not read the policy's weights or call a
            collective.
        takes_pictures: Whether prompts may have pictures, whose tokens have ids beyond the policy's vocabulary.
    """

    copies_weights: ClassVar[bool] = False
    reports_logprobs: ClassVar[bool] = True
    samples_elsewhere: ClassVar[bool] = False
    takes_pictures: ClassVar[bool] = False

    @property
    def room(self) -> int | None:
        """The tokens of a prompt and all that follows for which there is room; None if the model alone limits them."""
        return None

    def check(self, policy: PolicySource, loading: Loading) -> None:  # noqa: B027  (most engines need nothing)
        """Raise now for what would fail later: called at the start of a run, before the policy is loaded."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """Sample `group_size` responses to each prompt; rows of one prompt are neighbours.

        The result is a function of the weights and the arguments: the global random state is neither used nor changed.
        """

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """Like `generate`, with a seed of 63 bits for each row, so that a response depends on no other row of the call.

        `test` samples in this way, and so do continuations for credit methods. An engine that does not override the
        method draws the whole call from one seed, so that its responses depend on the division into batches.
        """
        return self.generate(prompts, group_size, sampling, derive_seed(*seeds))

    def turns(self, sampling: Sampling) -> AbstractContextManager[TurnSampler]:
        """A sampler of rollouts of several turns, for the duration of one batch.

        By default each turn is a call of `generate_seeded` with all tokens so far as the prompt.
        """
        return nullcontext(partial(resend_turns, self, sampling))

    @abstractmethod
    def update_weights(self, policy: Policy) -> None:
        """Sample with the present weights of `policy` from now on.

        It is called before every sampling. An engine without a copy of the weights stores the policy, and calls it.
        """

    def cancel(self) -> None:  # noqa: B027  (an engine that soon ends by itself needs nothing)
        """Make a `generate` that runs in another thread raise soon: the process is about to end."""


def build_batch(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    responses: list[list[int]],
    finished: list[bool],
    sampling_logprobs: list[list[float]] | None = None,
    *,
    sampled: list[list[bool]] | None = None,
    turn: list[list[int]] | None = None,
) -> SampledBatch:
    """Assemble a batch from sampled ids, for use by engines; or from rollouts of several turns.

    Args:
        policy: The policy that encodes the prompts and decodes the responses.
        prompts: The ``B / group_size`` prompts.
        group_size: The number of responses to each prompt.
        responses: ``B`` lists of sampled ids, the end token included; with several turns all ids after the prompt.
        finished: ``B`` values: whether the response ended by itself.
        sampling_logprobs: ``B`` lists as long as the responses, with any number for a token that was not sampled,
            and NaN for one of which there is none.
        sampled: ``B`` lists as long as the responses: whether the policy sampled the token; None if all are.
        turn: ``B`` lists as long as the responses, the numbers of the turns, see `SampledBatch.turn`; given with
            `sampled`. The texts are then those of the last turns.
    """
    pad = policy.tokenizer.pad_token_id
    encoded = [ids for prompt in prompts for ids in [policy.encode(prompt.messages)] * group_size]
    prompt_ids, prompt_mask = pad_left(encoded, pad)
    lengths = torch.tensor([len(ids) for ids in responses], dtype=torch.long)
    response_ids = _right_padded(responses, pad, torch.int32)
    valid = lengths_to_mask(lengths, response_ids.shape[1])
    texts = responses
    if turn is not None and sampled is not None:
        texts = [_last_turn(*row) for row in zip(responses, sampled, turn, strict=True)]
    return SampledBatch(
        input_ids=torch.cat([prompt_ids.int(), response_ids], 1),
        attention_mask=torch.cat([prompt_mask, valid], 1),
        response_ids=response_ids,
        response_mask=valid if sampled is None else _right_padded(sampled, False, torch.bool),
        group=torch.arange(len(prompts)).repeat_interleave(group_size),
        row=torch.arange(len(responses)),
        finished=torch.tensor(finished, dtype=torch.bool),
        prompts=[prompt for prompt in prompts for _ in range(group_size)],
        texts=[decode(policy, ids) for ids in texts],
        sampling_logprobs=None if sampling_logprobs is None else _right_padded(sampling_logprobs, 0.0, torch.float32),
        turn=None if turn is None else _right_padded(turn, 0, torch.long),
    ).to(policy.device)


def given_batch(policy: Policy, prompts: Sequence[Prompt]) -> SampledBatch:
    """A batch of existing responses, from the column `response` of each prompt; one response for each prompt.

    Neighbours with the same `response_group`, without this column with the same messages, are a group.

    The columns `response_ids` and `finished` give the sampled tokens, and whether the response ended by itself. Without
    them the text is tokenised, and counts as finished. Rollouts of several turns also have `response_turns`, the number
    of the turn in which each of these tokens was sampled (−1 if an environment put it in), `prompt_ids`, and `episode`.
    """
    if any("num_invalid_calls" in p.columns and "response_turns" not in p.columns for p in prompts):
        raise ValueError(
            "A given rollout of several turns must have the columns `response_ids`, `response_turns`, `prompt_ids` and "
            "`episode`, but got its text alone, which does not say what the policy sampled. Give what `KeepRollouts` "
            "kept by `data.kept`."
        )
    ids = [
        [int(token) for token in prompt.columns["response_ids"]]
        if "response_ids" in prompt.columns
        else list(policy.tokenizer(str(prompt.columns["response"]), add_special_tokens=False)["input_ids"])
        for prompt in prompts
    ]
    finished = [bool(prompt.columns.get("finished", True)) for prompt in prompts]
    numbered = enumerate(groupby(prompts, key=response_group))
    group = torch.tensor([k for k, (_, members) in numbered for _ in members], dtype=torch.long, device=policy.device)
    if not any("response_turns" in prompt.columns for prompt in prompts):
        return build_batch(policy, prompts, 1, ids, finished).replace(group=group)
    turns = [prompt.columns.get("response_turns", [0] * len(row)) for prompt, row in zip(prompts, ids, strict=True)]
    sampled = [[number >= 0 for number in row] for row in turns]
    # What an environment answers to a turn counts as part of it.
    turns = [list(accumulate(row, max)) for row in turns]
    encoded_prompts = [
        replace(p, messages=TokenText("", p.columns["prompt_ids"])) if "prompt_ids" in p.columns else p for p in prompts
    ]
    batch = build_batch(policy, encoded_prompts, 1, ids, finished, sampled=sampled, turn=turns)
    episodes = [
        read_episode(p.columns["episode"]) if "episode" in p.columns else one_turn(text, whole)
        for p, text, whole in zip(prompts, batch.texts, finished, strict=True)
    ]
    return batch.replace(prompts=list(prompts), episodes=episodes, group=group)


def longest_row(engine: RolloutEngine, policy: Policy) -> float:
    """The tokens of a row for which model and engine have room; infinite if neither limits them."""
    rooms = positions(policy.model.config), engine.room
    return min((room for room in rooms if room is not None), default=math.inf)


def check_room(policy: Policy, encoded: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Check that the longest prompt and the response limit fit into the model's positions; for use by engines."""
    limit = positions(policy.model.config)
    longest = max((len(ids) for ids in encoded), default=0)
    if limit is not None and longest + sampling.max_response_length > limit:
        raise ValueError(
            f"A prompt of {longest} tokens and `max_response_length` {sampling.max_response_length} exceed the model's "
            f"{limit} positions. Lower `max_response_length`, or leave such prompts out of the data."
        )


def _last_turn(ids: Sequence[int], sampled: Sequence[bool], turn: Sequence[int]) -> list[int]:
    last = max((number for is_sampled, number in zip(sampled, turn, strict=True) if is_sampled), default=None)
    return [
        token for token, is_sampled, number in zip(ids, sampled, turn, strict=True) if is_sampled and number == last
    ]


def decode(policy: Policy, ids: list[int]) -> str:
    """The text that is graded: the ids decoded without special tokens and without clean-up."""
    text: str = policy.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _right_padded(rows: Sequence[list[int] | list[float] | list[bool]], pad: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows), default=0)
    padded = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)


# --- turn by turn -----------------------------------------------------------------------------------------------------
#
# What an engine offers to a loop in which an environment answers after each turn. Ids are only ever appended.


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
        span = slice(min(length, request.limit))
        logprobs = None if batch.sampling_logprobs is None else batch.sampling_logprobs[k][span].tolist()
        finished = bool(batch.finished[k]) and length <= request.limit
        turns.append(SampledTurn(batch.response_ids[k][span].tolist(), logprobs, finished))
    return turns

"""Sampling with Transformers models, with the weights that are being trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, groupby
from typing import NamedTuple, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.core.engines.base import (
    RolloutEngine,
    SampledTurn,
    TurnRequest,
    TurnSampler,
    build_batch,
    check_room,
    resend_turns,
)
from grail_lightning.core.engines.hf.decoding import Decoding, Stored, TurnOptions, why_generate
from grail_lightning.core.engines.hf.draw import Ending, Sampled, warpers
from grail_lightning.core.engines.hf.loops import Loop, Method, find_loop
from grail_lightning.core.engines.hf.static import has_window
from grail_lightning.core.policy.compile import Compile
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import positions
from grail_lightning.core.policy.weights import weights_cast_once
from grail_lightning.core.records.picture import FIRST_PICTURE_ID
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import SampledBatch, Sampling, pad_left
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.collectives import pad_to_longest_rank, world_size
from grail_lightning.core.runtime.seeds import derive_seed, seeded


class HFEngine(RolloutEngine):
    """An engine that samples from the trained policy itself, with left-padded prompts and a KV cache.

    The method "compact" runs a prompt once for its whole group, decodes rows as one until they draw different tokens,
    and removes finished rows. The method "static" draws the same tokens, up to rounding, with a cache whose shape stays
    the same for some hundred tokens: on CUDA a token is then one graph, and the host does not wait for it. A row's
    random numbers depend on the seed and on the row's index in the batch, not on the other rows, on `cache_tokens` or
    on the device. Transformers' `generate` runs each prompt once a response and computes finished rows until the last
    one ends. All methods draw from the same distributions; for one seed the texts of `generate` differ.

    Args:
        cache_tokens: Most tokens in the KV cache, rows × (prompt + `max_response_length`); the remaining rows are
            decoded in a further call. A token of Qwen3-4B takes 147 KB in half precision and 295 KB in float32.
            Rollouts of several turns take up to twice the memory: what their tokens so far have in the cache is kept
            while their environments answer, also at most `cache_tokens`. Rows beyond that are read again.
        method: "auto" is "static" on CUDA and "compact" elsewhere, where "static" gains nothing; "generate" is
            Transformers' own loop. Models that "static" does not support (sliding windows, sharded weights, attention
            without a mask) are sampled by "compact", and those that "compact" does not support either (state spaces,
            caches other than keys and values per token) by "generate". One line says so.
        compile: Whether the decoder's blocks are compiled by `torch.compile` for decoding ("static" and "compact").
            auto does so on CUDA, unless deterministic algorithms or autocast (bf16-mixed) are on, weights are sharded,
            or the model has sliding windows. true takes the backend inductor; a name takes another, `aot_eager` and
            `eager` to find out what a model fails in. Blocks that fail in a trial run as they are, which one line says.
    """

    takes_pictures = True

    def __init__(self, cache_tokens: int = 131_072, method: Method = "auto", compile: Compile = "auto") -> None:
        check_option("cache_tokens", cache_tokens, "[1, inf)")
        check_option("method", method, Method)
        if not isinstance(compile, bool):
            check_option("compile", compile, get_args(Compile)[1])
        self.cache_tokens, self.method, self.compile = cache_tokens, method, compile
        self._policy: Policy | None = None
        self._loops: dict[tuple[torch.device, torch.dtype], Loop | None] = {}  # Of the policy, by where it computes.

    def update_weights(self, policy: Policy) -> None:
        """Store the policy. No weights are copied, since the policy itself samples."""
        if policy is self._policy:
            return
        self._policy, self._loops = policy, {}
        # Once a policy: Python repeats a warning whose filters have changed meanwhile, and libraries change them often.
        if self.method != "generate" and why_generate(policy.model):
            rank_zero_warn(
                f"`HFEngine` samples from `{type(policy.model).__name__}` by Transformers' `generate`: finished rows "
                'cannot be removed from its cache. This is no error; set `method="generate"` to silence this warning.'
            )

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """See `RolloutEngine.generate`."""
        # One stream for all rows, in their order, so that the division of rows into calls has no effect.
        stream = torch.Generator().manual_seed(seed)
        return self._sample(prompts, group_size, sampling, seed, (stream for _ in range(len(prompts) * group_size)))

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`; `generate` draws the whole call from one seed."""
        streams = (torch.Generator().manual_seed(seed) for seed in seeds)
        return self._sample(prompts, group_size, sampling, derive_seed(*seeds), streams)

    @contextmanager
    def turns(self, sampling: Sampling) -> Iterator[TurnSampler]:
        """See `RolloutEngine.turns`. Each turn continues from the KV cache of the one before; `generate` has none."""
        policy = self._loaded
        if self.method == "generate" or why_generate(policy.model):
            yield partial(self._resend, policy, sampling)
            return
        sampler = ContinuedTurns(policy, sampling, self.cache_tokens, self._synchronised, self._find_loop)
        try:
            yield sampler
        finally:
            sampler.waiting.clear()

    def _resend(self, policy: Policy, sampling: Sampling, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
        """`resend_turns`, in several calls where there is no room for the longest prompt with the largest limit."""
        room, parts = positions(policy.model.config) or math.inf, [list[TurnRequest]()]
        longest = limit = 0  # Of the last part.
        for request in requests:
            longest, limit = max(longest, len(request.ids)), max(limit, request.limit)
            if longest + limit > room:
                parts.append([])
                longest, limit = len(request.ids), request.limit
            parts[-1].append(request)
        if self._synchronised:
            parts = pad_to_longest_rank(parts, [], policy.device)
        return [turn for part in parts for turn in resend_turns(self, sampling, part)]

    @property
    def _loaded(self) -> Policy:
        if self._policy is None:
            raise ValueError("`HFEngine` has no policy yet. Call `update_weights(policy)` first.")
        return self._policy

    def _sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        streams: Iterator[torch.Generator],
    ) -> SampledBatch:
        """Sample with "compact" from one stream a row, or with Transformers' `generate` from `seed`.

        The rows are cut into calls, of which synchronised ranks make equally many; an additional one has no rows.
        """
        policy = self._loaded
        encoded = [policy.encode(prompt.messages) for prompt in prompts]
        check_room(policy, encoded, sampling)
        rows = [ids for ids in encoded for _ in range(group_size)]
        longest = max((len(row) for row in rows), default=0) + sampling.max_response_length
        size = max(self.cache_tokens // longest, 1)
        calls = [rows[k : k + size] for k in range(0, len(rows), size)]
        if self._synchronised:
            calls = pad_to_longest_rank(calls, [], policy.device)
        responses: list[list[int]] = []
        logprobs: list[list[float]] = []
        finished: list[bool] = []
        with policy.evaluating(), seeded(policy.device, seed), torch.no_grad(), weights_cast_once(policy):
            loop = self._find_loop(policy)
            for part in calls:
                if loop is None:
                    sampled = self._generate(policy, part, sampling)
                else:
                    sampled = self._decode(loop, policy, part, sampling, streams)
                lengths = sampled.lengths.tolist()[: len(part)]
                responses += [ids[:length] for ids, length in zip(sampled.ids.tolist(), lengths, strict=False)]
                logprobs += [row[:length] for row, length in zip(sampled.logprobs.tolist(), lengths, strict=False)]
                finished += sampled.finished.tolist()[: len(part)]
        return build_batch(policy, prompts, group_size, responses, finished, logprobs)

    @property
    def _synchronised(self) -> bool:
        """Whether ranks make equally many forward passes, as fully sharded weights (FSDP2) require."""
        return world_size() > 1

    def _find_loop(self, policy: Policy) -> Loop | None:
        """What `find_loop` finds, once for the policy on its device and in the dtype in which it computes now."""
        key = policy.device, policy.compute_dtype
        if key not in self._loops:
            self._loops[key] = find_loop(policy, self.method, self.compile)
        return self._loops[key]

    def _decode(
        self, loop: Loop, policy: Policy, rows: list[list[int]], sampling: Sampling, streams: Iterator[torch.Generator]
    ) -> Sampled:
        width = sampling.max_response_length
        # One stream for each row and no more: the rows of the next call go on with the next stream.
        noise = [torch.rand(width, dtype=torch.float64, generator=next(streams)) for _ in rows]
        return loop(policy, rows, sampling, noise, synchronised=self._synchronised).run()

    def _generate(self, policy: Policy, rows: list[list[int]], sampling: Sampling) -> Sampled:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        ids, mask = pad_left(rows or [policy.encode(".")], policy.tokenizer.pad_token_id)
        if (ids >= FIRST_PICTURE_ID).any():
            raise ValueError(
                f"Transformers' `generate` does not take ids of pictures, and `{type(policy.model).__name__}` is "
                "sampled by it. Use `method: auto`, and a model that it supports."
            )
        recorder = _Recorder(Ending(policy, sampling), sampling.logprob_temperature, ids.shape)
        out = policy.model.generate(
            input_ids=ids.to(policy.device),
            attention_mask=mask.long().to(policy.device),
            generation_config=GenerationConfig(
                do_sample=sampling.temperature > 0,
                # Without these options `generate` would apply top-k 50. Our own top-k and top-p follow the recorder.
                **({"top_k": 0, "top_p": 1.0} if sampling.temperature > 0 else {}),
                max_new_tokens=sampling.max_response_length,
                eos_token_id=list(policy.end_token_ids) or None,
                pad_token_id=policy.tokenizer.pad_token_id,
                use_cache=True,
                return_dict_in_generate=True,
            ),
            logits_processor=LogitsProcessorList([recorder.scores, *warpers(sampling)]),
            stopping_criteria=StoppingCriteriaList([recorder.ends]),
            synced_gpus=self._synchronised,
        )
        # The first name since Transformers 5.24.
        assert "cache" in out or "past_key_values" in out, "`generate` ran without its KV cache"
        logprobs = torch.stack(recorder.logprobs, 1)
        return Sampled(out.sequences[:, ids.shape[1] :], logprobs, recorder.lengths, recorder.finished)


class _Recorder:
    """What Transformers' `generate` does not keep: where each row ends, and the log-probabilities of sampled tokens.

    These are those before top-k and top-p. The ids do not show where a row ended: `generate` pads finished rows, and
    the pad token may be an end token.
    """

    def __init__(self, ending: Ending, temperature: float, prompts: torch.Size) -> None:
        self.ending, self.temperature, self.prompt_width = ending, temperature, prompts[1]
        self.logprobs: list[Tensor] = []
        self.lengths = torch.zeros(prompts[0], dtype=torch.long, device=ending.end_tokens.device)
        self.finished = torch.zeros_like(self.lengths, dtype=torch.bool)

    def scores(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[n, V]`` divided by the temperature, as the first logits processor."""
        scaled = scores / self.temperature
        self.pending = scaled.log_softmax(-1)
        return scaled

    def ends(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """``[n]`` bool: the rows that have finished, as a stopping criterion."""
        self.logprobs.append(self.pending.gather(1, input_ids[:, -1:]).squeeze(1))
        self.lengths = self.lengths + ~self.finished
        self.finished = self.finished | self.ending(input_ids[:, self.prompt_width :])
        return self.finished


# --- turn by turn -----------------------------------------------------------------------------------------------------


class _Waiting(NamedTuple):
    ids: list[int]  # The tokens that have been read.
    stored: Stored  # Their keys and values.

    def begins(self, ids: list[int]) -> bool:
        return len(self.ids) < len(ids) and self.ids == ids[: len(self.ids)]


class ContinuedTurns:
    """A `TurnSampler` whose turns begin with the keys and values of the turns before and read what is new alone.

    Rows of which nothing is kept (in their first turn, because `cache_tokens` are full, or with a sliding window) are
    read as a whole. Rows in one call have the same stop strings. A row's random numbers are those of a generator with
    its seed.
    """

    def __init__(
        self,
        policy: Policy,
        sampling: Sampling,
        cache_tokens: int,
        synchronised: bool,
        find_loop: Callable[[Policy], Loop | None],
    ) -> None:
        self.policy, self.sampling, self.find_loop = policy, sampling, find_loop
        self.cache_tokens, self.synchronised = cache_tokens, synchronised
        self.ending = cache(lambda stop: Ending(policy, replace(sampling, stop=stop)))
        self.keeps = not has_window(policy)
        self.waiting: dict[int, _Waiting] = {}  # By the row's index in the batch.

    def __call__(self, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
        """See `TurnSampler`. What is kept of rows without a request is freed."""
        assert all(request.limit > 0 for request in requests), "a turn has at least one token"
        if requests:
            longest = max(requests, key=lambda request: len(request.ids) + request.limit)
            check_room(self.policy, [longest.ids], replace(self.sampling, max_response_length=longest.limit))
        self.waiting = {
            request.row: entry
            for request in requests
            if (entry := self.waiting.get(request.row)) and entry.begins(request.ids)
        }

        def kind(request: TurnRequest) -> tuple[bool, tuple[str, ...]]:
            return request.row not in self.waiting, request.stop

        kinds = groupby(sorted(requests, key=kind), key=kind)
        calls = [call for _, rows in kinds for call in self._calls([*rows])]
        if self.synchronised:
            calls = pad_to_longest_rank(calls, [], self.policy.device)
        turns: dict[int, SampledTurn] = {}
        with self.policy.evaluating(), torch.no_grad(), weights_cast_once(self.policy):
            for call in calls:
                turns.update(self._play(call))
        return [turns[request.row] for request in requests]

    def _calls(self, requests: Sequence[TurnRequest]) -> list[Sequence[TurnRequest]]:
        """The requests cut into calls, whose cache has columns for the longest kept, new and sampled tokens."""
        lengths = [len(self.waiting[request.row].ids) if request.row in self.waiting else 0 for request in requests]
        new = [len(request.ids) - size for request, size in zip(requests, lengths, strict=True)]
        columns = sum(max(sizes, default=0) for sizes in (lengths, new, [request.limit for request in requests]))
        size = max(self.cache_tokens // max(columns, 1), 1)
        return [requests[k : k + size] for k in range(0, len(requests), size)]

    def _play(self, call: Sequence[TurnRequest]) -> dict[int, SampledTurn]:
        begin = [self.waiting.pop(request.row).stored for request in call if request.row in self.waiting]
        room = self.cache_tokens * self.keeps - sum(len(entry.ids) for entry in self.waiting.values())
        turn = TurnOptions(
            ending=self.ending(call[0].stop if call else ()),
            limits=[request.limit for request in call],
            begin=begin,
            keep=[tokens <= room for tokens in accumulate(len(request.ids) + request.limit for request in call)],
        )
        width = max(turn.limits, default=1)
        noise = [
            torch.rand(width, dtype=torch.float64, generator=torch.Generator().manual_seed(request.seed))
            for request in call
        ]
        loop = self.find_loop(self.policy) or Decoding
        decoding = loop(
            self.policy,
            [request.ids for request in call],
            replace(self.sampling, max_response_length=width),
            noise,
            synchronised=self.synchronised,
            turn=turn,
        )
        del begin, turn
        sampled = decoding.run()
        turns = {}
        rows = zip(call, *(values.tolist() for values in sampled), strict=False)
        for k, (request, ids, logprobs, length, finished) in enumerate(rows):
            turns[request.row] = SampledTurn(ids[:length], logprobs[:length], finished)
            if k in decoding.stored:
                self.waiting[request.row] = _Waiting(request.ids + ids[: length - 1], decoding.stored[k])
        return turns

"""Turns that continue from the keys and values of the turns before, so that no token is read twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from grail_lightning.batch import Sampling
from grail_lightning.engines.base import SampledTurn, TurnRequest, check_room
from grail_lightning.engines.cache import GrowingCache
from grail_lightning.engines.decoding import Decoding, Stored, TurnOptions
from grail_lightning.engines.draw import Ending
from grail_lightning.policy import Policy
from grail_lightning.policy.reference import weights_cast_once
from grail_lightning.runtime.collectives import pad_to_longest_rank


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

    def __init__(self, policy: Policy, sampling: Sampling, cache_tokens: int, synchronised: bool) -> None:
        self.policy, self.sampling = policy, sampling
        self.cache_tokens, self.synchronised = cache_tokens, synchronised
        self.ending = cache(lambda stop: Ending(policy, replace(sampling, stop=stop)))
        self.keeps = GrowingCache(policy.model.config.get_text_config(decoder=True), 0, 0).takes_padding
        self.waiting: dict[int, _Waiting] = {}  # By the row's index in the batch.

    def __call__(self, requests: Sequence[TurnRequest]) -> list[SampledTurn]:
        """See `TurnSampler`. What is kept of rows without a request is freed."""
        assert all(request.limit > 0 for request in requests), "a turn has at least one token"
        if requests:
            longest = max(requests, key=lambda request: len(request.ids) + request.limit)
            check_room(self.policy, [longest.ids], replace(self.sampling, max_response_length=longest.limit))
        self.waiting = {
            request.row: kept
            for request in requests
            if (kept := self.waiting.get(request.row)) and kept.begins(request.ids)
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
        kept = [len(self.waiting[request.row].ids) if request.row in self.waiting else 0 for request in requests]
        new = [len(request.ids) - size for request, size in zip(requests, kept, strict=True)]
        columns = sum(max(sizes, default=0) for sizes in (kept, new, [request.limit for request in requests]))
        size = max(self.cache_tokens // max(columns, 1), 1)
        return [requests[k : k + size] for k in range(0, len(requests), size)]

    def _play(self, call: Sequence[TurnRequest]) -> dict[int, SampledTurn]:
        begin = [self.waiting.pop(request.row).stored for request in call if request.row in self.waiting]
        room = self.cache_tokens * self.keeps - sum(len(kept.ids) for kept in self.waiting.values())
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
        decoding = Decoding(
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

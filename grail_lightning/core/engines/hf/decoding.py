"""A decoding loop that runs common beginnings of rows once, and removes finished rows from the batch.

Shapes: ``N`` rows of a call, of which ``n`` are still in the batch and use ``m`` rows of the cache; ``W`` prompt
columns, ``T`` response columns, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.engines.hf.cache import GrowingCache, can_drop_rows, tokens_of
from grail_lightning.core.engines.hf.draw import Ending, Sampled, draw, warpers
from grail_lightning.core.functional.tokens import full_precision
from grail_lightning.core.policy.capabilities import cache_argument
from grail_lightning.core.policy.compile import CompiledBlocks
from grail_lightning.core.policy.layout import token_positions
from grail_lightning.core.policy.micro_batch import MIN_COMMON_TOKENS
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import Sampling, pad_left
from grail_lightning.core.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIN_FINISHED_SHARE = 0.05
"""Share of the batch that must have finished before rows are removed, which is cheap but synchronises with a GPU."""


def why_generate(model: PreTrainedModel) -> str | None:
    """Why Transformers' `generate` samples from a model in place of `Decoding`; None for a plain decoder."""
    from transformers import GenerationMixin  # Its module is slow to import, and `--help` is not.

    # These attributes are not public. If a later release renames them, `generate` itself still works.
    used = ("_supports_default_dynamic_cache", "_supports_logits_to_keep", "_optimize_model_for_decode")
    if not isinstance(model, GenerationMixin) or not all(hasattr(model, name) for name in used):
        return "it has not all methods of Transformers' `generate`"
    if not type(model)._supports_default_dynamic_cache():
        return "its cache is a class of its own"
    if type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares the inputs of a decoding step in its own way"
    if not can_drop_rows(model.config.get_text_config(decoder=True)):
        return "layers keep a state beside keys and values"
    takes = inspect.signature(model.forward).parameters.keys()
    return None if {"position_ids", cache_argument(model)} <= takes else "it takes no positions"


class Stored(NamedTuple):
    """The beginning of a row whose keys and values are known."""

    size: int  # The number of tokens.
    tables: tuple[Tensor, ...]  # Their keys and values ``[size, H, d]``, layer by layer.


class TurnOptions(NamedTuple):
    """What a call of one turn of ``N`` rollouts needs beside their ids."""

    ending: Ending  # Tests the responses' ends. It is slow to make, and the same in all turns.
    limits: Sequence[int]  # ``N``, most tokens of each response.
    begin: Sequence[Stored]  # ``N`` beginnings, shorter than the rows, which are not read again; or none at all.
    keep: Sequence[bool]  # ``N``, whether the keys and values of the row and its response are stored.


class Decoding:
    """One call of the loop: rows are decoded together, and finished rows are removed.

    Rows of one prompt use one row of the cache as long as they draw the same tokens, and a long common beginning of
    all prompts is run once. A row's token is a function of its logits and of one uniform number, of no other row.

    The policy is in evaluation mode. `rows` are ``N`` lists of prompt ids; adjacent equal prompts start with one row of
    the cache. Without rows, a placeholder makes the forward passes that other ranks wait for, and no rank waits for its
    end. `noise` are ``N`` tensors ``[T]`` float64 in ``[0, 1)``, on the CPU, not used at temperature 0. `synchronised`
    ranks make as many forward passes as the one that makes most. After `run` of a turn `stored` is, by the row's index,
    what the next turn may begin with: all but the last sampled token, which has not been read.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Sequence[Sequence[int]],
        sampling: Sampling,
        noise: list[Tensor],
        *,
        synchronised: bool = False,
        turn: TurnOptions | None = None,
        blocks: CompiledBlocks | None = None,
    ) -> None:
        device, idle = policy.device, not rows
        if idle:
            half = torch.full((sampling.max_response_length,), 0.5, dtype=torch.float64)
            rows, noise, turn = [policy.encode(".")], [half], turn and turn._replace(limits=[1], keep=[False])
        self.policy, self.sampling, self.synchronised, self.blocks = policy, sampling, synchronised, blocks
        self.prompts, self.warpers = rows, warpers(sampling)
        self.ending = Ending(policy, sampling) if turn is None else turn.ending
        self.begin: Sequence[Stored] = turn.begin if turn else ()
        self.limits = torch.tensor(turn.limits, device=device) if turn else None
        self.keep = torch.tensor(turn.keep, device=device) if turn else None
        self.stored: dict[int, Stored] = {}
        self.noise = torch.stack(noise).to(device).T
        cached_sizes = [stored.size for stored in self.begin] or [0] * len(rows)
        read = max(len(row) - size for row, size in zip(rows, cached_sizes, strict=True))
        limit = max(cached_sizes) + read + sampling.max_response_length
        self.cache = GrowingCache(policy.model.config.get_text_config(decoder=True), limit, len(rows))
        self.cache_argument = cache_argument(policy.model)
        self.common, self.padded = 0, False
        shape = (len(rows), sampling.max_response_length)
        self.ids = torch.full(shape, policy.tokenizer.pad_token_id, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.cut = torch.zeros_like(self.finished)
        self.rows = torch.arange(len(rows), device=device)
        self.place: Tensor | None = None  # The row of the cache that each row uses; None if every row has its own.
        self.alive = torch.full((len(rows),), not idle, device=device)

    def run(self) -> Sampled:
        """Sampled ids of all ``N`` rows, padded after each row's end; a `ValueError` if the logits are not finite."""
        logits = self._read_prompts()
        # `generate` does the same: mixtures of experts use another GPU kernel for a step of one token a row.
        with self.policy.model._optimize_model_for_decode():
            self._draw_responses(logits)
        self._store(torch.arange(len(self.rows), device=self.rows.device))
        if not self.logprobs.isfinite().all():
            raise ValueError(
                "The policy's logits must be finite to sample from, but got NaN or infinity. Look for a step whose "
                "loss or gradient norm exploded, lower the learning rate, or sample in float32."
            )
        return Sampled(self.ids, self.logprobs, self.lengths, self.finished & ~self.cut)

    def _draw_responses(self, logits: Tensor) -> None:
        """Draw the tokens of all responses, the first ones from ``logits [m, V]``."""
        for step in range(self.sampling.max_response_length - 1):
            tokens = self._record(logits, step)
            if self._all_finished():
                return
            logits = self._forward(self._next_inputs(tokens, logits.shape[-1]))
        self._record(logits, self.sampling.max_response_length - 1)
        self._wait_for_ranks()

    def _read_prompts(self) -> Tensor:
        """Fill the cache; returns the logits ``[m, V]`` of the first response token."""
        first = [k for k, row in enumerate(self.prompts) if k == 0 or row != self.prompts[k - 1]]
        prompts, device = [self.prompts[k] for k in first], self.rows.device
        last = {"logits_to_keep": 1} if self.policy.model._supports_logits_to_keep() else {}
        self.common = self._common_beginning(prompts)
        cache_mask = self._fill([self.begin[k] for k in first]) if self.begin else self._read_common(prompts, last)
        sizes = cache_mask.sum(1)
        rest = [prompt[size:] for prompt, size in zip(prompts, sizes.tolist(), strict=True)]
        ids, mask = pad_left(rest, self.policy.tokenizer.pad_token_id)
        ids, mask = ids.to(device), mask.to(device)
        response = mask.new_ones(len(prompts), self.sampling.max_response_length)
        self.column = cache_mask.shape[1] + ids.shape[1]
        self.valid = torch.cat([cache_mask, mask, response], 1)
        self.padded = not bool(self.valid.all())
        # With a token that is nobody's at the place of the first response token.
        whole, seen = pad_left([[*prompt, 0] for prompt in prompts], 0)
        positions = self.policy.position_ids(whole.to(device), token_positions(seen.to(device)))
        self.positions = positions[..., -1]
        copies = torch.tensor([*first[1:], len(self.prompts)]) - torch.tensor(first)
        if len(first) < len(self.prompts):
            self.place = torch.arange(len(first)).repeat_interleave(copies).to(device)
        options = last | {"attention_mask": self._mask(self.valid[:, : self.column])}
        return self._model(self.policy.inputs(ids), positions[..., -1 - ids.shape[1] : -1], **options)

    def _read_common(self, prompts: Sequence[Sequence[int]], last: dict[str, int]) -> Tensor:
        """Run the common beginning; ``[m, common]`` bool, which are all true."""
        if self.common:
            ids = torch.tensor([prompts[0][: self.common]], device=self.rows.device)
            mask = torch.ones_like(ids, dtype=torch.bool)
            positions = self.policy.position_ids(ids, token_positions(mask))
            self._model(self.policy.inputs(ids), positions, attention_mask=None, **last)
            self.cache.keep_rows(torch.zeros(len(prompts), dtype=torch.long, device=ids.device))
        return self.alive.new_ones(len(prompts), self.common)

    def _fill(self, begin: Sequence[Stored]) -> Tensor:
        """Fill the cache with stored beginnings of rows; ``[m, columns]`` bool, the columns that are not padding."""
        sizes = torch.tensor([stored.size for stored in begin], device=self.rows.device)
        columns = int(sizes.max())
        valid = torch.arange(columns, device=sizes.device) >= columns - sizes[:, None]
        self.cache.fill([stored.tables for stored in begin])
        self.begin = ()  # The memory is free, unless others hold the records.
        return valid

    def _common_beginning(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of tokens with which all different prompts begin, without the last, if it is worthwhile.

        Ranks that are synchronised make equally many passes, and so agree on the number.
        """
        # All rows agree as far as the first and the last in lexical order do.
        least, most = min(prompts, key=list), max(prompts, key=list)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(least[:-1], most[:-1], strict=False))))
        if len(prompts) == 1 or shared < MIN_COMMON_TOKENS or not self.cache.takes_padding or self.begin:
            shared = 0
        return int(all_reduce(self.lengths.new_tensor(shared), "min")) if self.synchronised else shared

    def _forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[m, V]`` after one further token ``[m]`` in each row of the cache."""
        self.column += 1
        positions, self.positions = self.positions, self.positions + 1
        return self._next_logits(tokens, positions, self._mask(self.valid[:, : self.column]))

    def _next_logits(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits ``[m, V]`` after sampled ``tokens [m]``, in blocks that are compiled if `blocks` are given."""
        ids = tokens[:, None]
        # No sampled token belongs to a picture. To look for them would wait for the device.
        embeds = None if self.policy.vision is None else self.policy.model.get_input_embeddings()(ids)
        with nullcontext() if self.blocks is None else self.blocks.running(self.cache):
            return self._model(self.policy.inputs(ids, embeds), positions[..., None], attention_mask=mask)

    def _mask(self, valid: Tensor) -> Tensor | None:
        return valid.long() if self.padded else None

    def _model(self, inputs: dict[str, Tensor | None], positions: Tensor, **options: Tensor | int | None) -> Tensor:
        cache = {self.cache_argument: self.cache}
        out = self.policy.model(**inputs, position_ids=positions, use_cache=True, **cache, **options)
        return full_precision(out.logits[:, -1])

    def _record(self, logits: Tensor, step: int | Tensor) -> Tensor:
        """Draw a token ``[n]`` for each row, and store it for the unfinished rows."""
        logits = logits if self.place is None else logits[self.place]
        tokens, logprobs = draw(logits, self.sampling, self.warpers, self.noise[step, self.rows])
        self.ids[self.rows, step] = torch.where(self.alive, tokens, self.policy.tokenizer.pad_token_id)
        self.logprobs[self.rows, step] = torch.where(self.alive, logprobs.float(), 0.0)
        self.lengths[self.rows] += self.alive
        self.alive &= ~self.ending(self._newest(step))
        self.finished[self.rows] = ~self.alive
        if self.limits is not None:
            beyond = step + 1 >= self.limits[self.rows]
            self.cut[self.rows] |= self.alive & beyond
            self.alive &= ~beyond
        return tokens

    def _newest(self, step: Any) -> Tensor:
        """``[n, t]``: the newest tokens of each row, of which the rule of its end reads as many."""
        return self.ids[self.rows, max(0, step + 1 - self.ending.reach) : step + 1]

    def _all_finished(self) -> bool:
        self.left = int(self.alive.sum())
        if not self.synchronised:
            return self.left == 0
        return not int(all_reduce(self.alive.new_tensor(self.left > 0, dtype=torch.long), "max"))

    def _wait_for_ranks(self) -> None:
        """Make the forward passes of ranks with a larger limit, with a token that is nobody's."""
        self.alive = torch.zeros_like(self.alive)
        while not self._all_finished():
            self.policy.model(input_ids=self.ids[:1, :1], use_cache=False)

    def _next_inputs(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """The tokens ``[m]`` to continue with, from those ``[n]`` that the rows drew.

        Finished rows are removed, and rows that drew different tokens get their own rows of the cache. One row remains
        while other ranks are still decoding.
        """
        finished, number = len(self.rows) - self.left, len(self.rows)
        if self.place is None and (finished < _MIN_FINISHED_SHARE * number or number == 1):
            return tokens
        if finished:
            self._store((~self.alive).nonzero().squeeze(1))
        place = torch.arange(number, device=tokens.device) if self.place is None else self.place
        indices = self.alive.nonzero().squeeze(1) if self.left else self.alive.new_zeros(1, dtype=torch.long)
        branches, branch = torch.unique(place[indices] * vocabulary + tokens[indices], return_inverse=True)
        parents = branches // vocabulary
        order = torch.arange(len(branches), device=parents.device)
        if len(parents) != len(self.valid) or not torch.equal(parents, order):
            order = self.cache.keep_rows(parents)
        self.positions, self.valid = self.positions[..., parents[order]], self.valid[parents[order]]
        branch = order.argsort()[branch]
        if len(branches) == len(indices):
            indices, self.place = indices[branch.argsort()], None
        else:
            self.place = branch
        self.rows, self.alive = self.rows[indices], self.alive[indices]
        if len(indices) < number:
            self._trim()
        following: Tensor = branches % vocabulary
        return following[order]

    def _trim(self) -> None:
        least = int(self.valid.any(0).long().argmax())
        if least and self.cache.takes_padding:
            self.cache.drop_columns(least)
            self.valid = self.valid[:, least:]
            self.column -= least
        self.padded = not bool(self.valid.all())

    def _store(self, indices: Tensor) -> None:
        """Store the rows with these `indices`, if they are to be kept and have not been stored."""
        if self.keep is None:
            return
        indices = indices[self.keep[self.rows[indices]]]
        rows = self.rows[indices]
        self.keep[rows] = False
        if not len(rows):
            return
        at = indices if self.place is None else self.place[indices]
        sizes = torch.tensor([len(self.prompts[row]) for row in rows.tolist()], device=rows.device)
        sizes = sizes + self.lengths[rows] - 1
        valid = self.valid[at, : self.column]
        row, column = (valid & (valid.cumsum(1) <= sizes[:, None])).nonzero(as_tuple=True)
        tables = [torch.split(table, sizes.tolist()) for table in tokens_of(self.cache, at[row], column)]
        for index, size, parts in zip(rows.tolist(), sizes.tolist(), zip(*tables, strict=True), strict=True):
            self.stored[index] = Stored(size, parts)

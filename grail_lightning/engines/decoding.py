"""A decoding loop that runs common beginnings of rows once, and removes finished rows from the batch.

Shapes: ``N`` rows of a call, of which ``n`` are still in the batch and use ``m`` rows of the cache; ``W`` prompt
columns, ``T`` response columns, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grail_lightning.batch import Sampling, pad_left
from grail_lightning.engines.draw import Ending, Sampled, draw, warpers, widest_float
from grail_lightning.functional.tokens import full_precision
from grail_lightning.policy import Policy
from grail_lightning.policy.micro_batch import MIN_COMMON_TOKENS
from grail_lightning.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIN_FINISHED_SHARE = 0.05
"""Share of the batch that must have finished before rows are removed, which is cheap but synchronises with a GPU."""


def supports(model: PreTrainedModel) -> bool:
    """Whether `Decoding` can run a model, which must be a plain decoder with a cache whose rows can be removed.

    Models with their own rules for a decoding step (state-space layers, long-context switches) are left to `generate`.
    """
    from transformers import GenerationMixin

    from grail_lightning.engines.cache import can_drop_rows

    # These attributes are not public. If a later release renames them, `generate` itself still works.
    used = ("_supports_default_dynamic_cache", "_supports_logits_to_keep", "_optimize_model_for_decode")
    return (
        isinstance(model, GenerationMixin)
        and all(hasattr(model, name) for name in used)
        and type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and bool(type(model)._supports_default_dynamic_cache())
        and {"position_ids", "past_key_values"} <= inspect.signature(model.forward).parameters.keys()
        and can_drop_rows(model.config.get_text_config(decoder=True))
    )


class Decoding:
    """One call of the loop: rows are decoded together, and finished rows are removed.

    Rows of one prompt use one row of the cache as long as they draw the same tokens, and a long common beginning of
    all prompts is run once. A row's token at a step is a function of its logits and of one uniform number, which is
    keyed by row and step. It does not depend on the other rows of the batch.

    Args:
        policy: The policy, in evaluation mode.
        rows: ``N`` lists of prompt ids; adjacent equal prompts start with one row of the cache.
        sampling: The sampling options.
        noise: ``[N, T]`` float64 in ``[0, 1)``, on the CPU. It is not used at temperature 0.
        synchronised: Whether to make as many forward passes as the rank that makes most. Limits may differ.
        idle: Whether the rows are there for these passes alone: no other rank waits for their end.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Sequence[Sequence[int]],
        sampling: Sampling,
        noise: Tensor,
        *,
        synchronised: bool = False,
        idle: bool = False,
    ) -> None:
        from grail_lightning.engines.cache import GrowingCache  # Transformers is slow to import, and `--help` is not.

        device = policy.device
        self.policy, self.sampling, self.synchronised = policy, sampling, synchronised
        self.prompts, self.warpers, self.ending = rows, warpers(sampling), Ending(policy, sampling)
        self.noise = noise.to(device, widest_float(device)).T
        limit = max(map(len, rows)) + sampling.max_response_length
        self.cache = GrowingCache(policy.model.config.get_text_config(decoder=True), limit, len(rows))
        self.common, self.padded = 0, False
        shape = (len(rows), sampling.max_response_length)
        self.ids = torch.full(shape, policy.tokenizer.pad_token_id, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.rows = torch.arange(len(rows), device=device)
        self.place: Tensor | None = None  # The row of the cache that each row uses; None if every row has its own.
        self.alive = torch.full((len(rows),), not idle, device=device)

    def run(self) -> Sampled:
        """Sampled ids of all ``N`` rows, padded after each row's end.

        Raises:
            ValueError: If the policy's logits are not finite.
        """
        logits = self._read_prompts()
        # `generate` does the same: mixtures of experts use another GPU kernel for a step of one token a row.
        with self.policy.model._optimize_model_for_decode():
            for step in range(self.sampling.max_response_length - 1):
                tokens = self._record(logits, step)
                if self._all_finished():
                    break
                logits = self._forward(self._next_inputs(tokens, logits.shape[-1]))
            else:
                self._record(logits, self.sampling.max_response_length - 1)
                self._wait_for_ranks()
        if not self.logprobs.isfinite().all():
            raise ValueError(
                "The policy's logits must be finite to sample from, but got NaN or infinity. Look for a step whose "
                "loss or gradient norm exploded, lower the learning rate, or sample in float32."
            )
        return Sampled(self.ids, self.logprobs, self.lengths, self.finished)

    def _read_prompts(self) -> Tensor:
        """Fill the cache with the prompts; returns the logits ``[m, V]`` of the first response token."""
        first = [k for k, row in enumerate(self.prompts) if k == 0 or row != self.prompts[k - 1]]
        prompts, device = [self.prompts[k] for k in first], self.rows.device
        last = {"logits_to_keep": 1} if self.policy.model._supports_logits_to_keep() else {}
        if common := self._common_beginning(prompts):
            begin = torch.arange(common, device=device)[None]
            self._model(torch.tensor([prompts[0][:common]], device=device), begin >= 0, begin, **last)
            self.cache.keep_rows(torch.zeros(len(prompts), dtype=torch.long, device=device))
            self.common = common
        ids, mask = pad_left([prompt[common:] for prompt in prompts], self.policy.tokenizer.pad_token_id)
        ids, mask = ids.to(device), mask.to(device)
        self.pads = (~mask).sum(1)
        self.padded = not bool(mask.all())
        self.column = common + ids.shape[1]
        positions = (common + mask.long().cumsum(1) - 1).clamp(min=0)
        copies = torch.tensor([*first[1:], len(self.prompts)]) - torch.tensor(first)
        if len(first) < len(self.prompts):
            self.place = torch.arange(len(first)).repeat_interleave(copies).to(device)
        return self._model(ids, self._valid(self.column), positions, **last)

    def _common_beginning(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of tokens with which all different prompts begin, if running them once is worthwhile.

        The last token of a prompt is never among them. Ranks that are synchronised make equally many passes, and so
        agree on the number.
        """
        # All rows agree as far as the first and the last in lexical order do.
        least, most = min(prompts, key=list), max(prompts, key=list)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(least[:-1], most[:-1], strict=False))))
        if len(prompts) == 1 or shared < MIN_COMMON_TOKENS or not self.cache.takes_padding:
            shared = 0
        return int(all_reduce(self.lengths.new_tensor(shared), "min")) if self.synchronised else shared

    def _valid(self, columns: int) -> Tensor:
        """``[m, columns]`` bool: the columns of the cache that are not padding, which follows the common beginning."""
        column = torch.arange(columns, device=self.pads.device)
        return (column < self.common) | (column >= self.common + self.pads[:, None])

    def _forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[m, V]`` after one further token ``[m]`` in each row of the cache."""
        self.column += 1
        return self._model(tokens[:, None], self._valid(self.column), (self.column - 1 - self.pads)[:, None])

    def _model(self, ids: Tensor, mask: Tensor, positions: Tensor, **options: int) -> Tensor:
        out = self.policy.model(
            input_ids=ids,
            attention_mask=mask.long() if self.padded else None,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        return full_precision(out.logits[:, -1])

    def _record(self, logits: Tensor, step: int) -> Tensor:
        """Draw a token ``[n]`` for each row, and store it for the unfinished rows."""
        logits = logits if self.place is None else logits[self.place]
        tokens, logprobs = draw(logits, self.sampling, self.warpers, self.noise[step, self.rows])
        kept, pad = self.alive, self.ids.new_tensor(self.policy.tokenizer.pad_token_id)
        self.ids[self.rows, step] = torch.where(kept, tokens, pad)
        self.logprobs[self.rows, step] = torch.where(kept, logprobs.float(), 0.0)
        newest = slice(max(0, step + 1 - self.ending.reach), step + 1)
        self.alive = kept & ~self.ending(self.ids[self.rows, newest])
        self.lengths[self.rows] += kept
        self.finished[self.rows] = ~self.alive
        return tokens

    def _all_finished(self) -> bool:
        self.left = int(self.alive.sum())
        waiting = self.alive.new_tensor(self.left > 0, dtype=torch.long)
        return not int(all_reduce(waiting, "max")) if self.synchronised else self.left == 0

    def _wait_for_ranks(self) -> None:
        """Make the forward passes of ranks with a larger limit, with a token that is nobody's."""
        self.alive = torch.zeros_like(self.alive)
        while not self._all_finished():
            self.policy.model(input_ids=self.ids[:1, :1], use_cache=False)

    def _next_inputs(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """The tokens ``[m]`` to continue with, from those ``[n]`` that the rows drew.

        Finished rows are removed, and rows that drew different tokens get their own rows of the cache. Once every row
        has its own, rows are removed only if that saves time. One row remains while other ranks are still decoding.
        """
        finished, number = len(self.rows) - self.left, len(self.rows)
        if self.place is None and (finished < _MIN_FINISHED_SHARE * number or number == 1):
            return tokens
        place = torch.arange(number, device=tokens.device) if self.place is None else self.place
        kept = self.alive.nonzero().squeeze(1) if self.left else self.alive.new_zeros(1, dtype=torch.long)
        branches, branch = torch.unique(place[kept] * vocabulary + tokens[kept], return_inverse=True)
        parents = branches // vocabulary
        order = torch.arange(len(branches), device=parents.device)
        if len(parents) != len(self.pads) or not torch.equal(parents, order):
            order = self.cache.keep_rows(parents)
        self.pads = self.pads[parents[order]]
        branch = order.argsort()[branch]
        if len(branches) == len(kept):
            kept, self.place = kept[branch.argsort()], None
        else:
            self.place = branch
        self.rows, self.alive = self.rows[kept], self.alive[kept]
        if len(kept) < number:
            self._trim()
        following: Tensor = branches % vocabulary
        return following[order]

    def _trim(self) -> None:
        """Remove columns that are padding in every remaining row."""
        least, most = (int(pads) for pads in self.pads.aminmax())
        if least and not self.common and self.cache.takes_padding:
            self.cache.drop_columns(least)
            self.pads = self.pads - least
            self.column -= least
            most -= least
        self.padded = most > 0

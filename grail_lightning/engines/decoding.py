"""A decoding loop that runs common beginnings of rows once, and removes finished rows from the batch.

Shapes: ``N`` rows of a call, of which ``n`` are still in the batch and use ``m`` rows of the cache; ``W`` prompt
columns, ``T`` response columns, ``V`` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grail_lightning.batch import Sampling, pad_left
from grail_lightning.engines.ending import Ending, Sampled
from grail_lightning.functional.tokens import full_precision
from grail_lightning.policy import Policy
from grail_lightning.runtime.collectives import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIN_FINISHED_SHARE = 0.05
"""Share of the batch that must have finished before rows are removed, which is cheap but synchronises with a GPU."""

_SUM_BLOCK = 512


def supports(model: PreTrainedModel) -> bool:
    """Whether `Decoding` can run a model, which must be a plain decoder with a cache whose rows can be removed.

    Models with their own rules for a decoding step (state-space layers, long-context switches) use Transformers'
    `generate`.
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

    Rows of one prompt use one row of the cache as long as they draw the same tokens. A row's token at a step is a
    function of its logits and of one uniform number, which is keyed by row and step. It does not depend on the other
    rows of the batch.

    Args:
        policy: The policy, in evaluation mode.
        rows: ``N`` lists of prompt ids; adjacent equal prompts start with one row of the cache.
        sampling: The sampling options.
        noise: ``[N, T]`` float64 in ``[0, 1)``, on the CPU. It is not used at temperature 0.
        synchronised: Whether to make as many forward passes as the rank that makes most.
        leave: The share of the batch that must have finished before rows are removed; above 1 none ever is.
    """

    def __init__(
        self,
        policy: Policy,
        rows: Sequence[Sequence[int]],
        sampling: Sampling,
        noise: Tensor,
        *,
        synchronised: bool = False,
        leave: float = _MIN_FINISHED_SHARE,
    ) -> None:
        from grail_lightning.engines.cache import GrowingCache  # Transformers is slow to import, and `--help` is not.

        device = policy.device
        self.policy, self.sampling, self.synchronised, self.leave = policy, sampling, synchronised, leave
        self.prompts = rows
        self.noise = noise.to(device, _wide(device)).T
        self.warpers = warpers(sampling)
        self.ending = Ending(policy, sampling)
        limit = max(map(len, rows)) + sampling.max_response_length
        self.cache = GrowingCache(policy.model.config.get_text_config(decoder=True), limit, len(rows))
        shape = (len(rows), sampling.max_response_length)
        self.ids = torch.full(shape, policy.tokenizer.pad_token_id, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(len(rows), dtype=torch.long, device=device)
        self.finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.rows = torch.arange(len(rows), device=device)
        # The row of the cache that each row uses; None if every row has its own.
        self.place: Tensor | None = None
        self.alive = torch.ones(len(rows), dtype=torch.bool, device=device)

    def run(self) -> Sampled:
        """Sampled ids of all ``N`` rows, padded after each row's end.

        Raises:
            ValueError: If the policy's logits are not finite.
        """
        logits = self._read_prompts()
        # `generate` does the same: mixtures of experts use another GPU kernel for a step of one token a row.
        with self.policy.model._optimize_model_for_decode():
            for step in range(self.sampling.max_response_length):
                tokens = self._record(logits, step)
                if step + 1 == self.sampling.max_response_length or self._all_finished():
                    break
                place, vocabulary = self.place, logits.shape[-1]
                kept = self._drop_finished(tokens) if place is None else self._fork(place, tokens, vocabulary)
                logits = self._forward(kept)
        if not self.logprobs.isfinite().all():
            raise ValueError(
                "The policy's logits must be finite to sample from, but got NaN or infinity. Look for a step whose "
                "loss or gradient norm exploded, lower the learning rate, or sample in float32."
            )
        return Sampled(self.ids, self.logprobs, self.lengths, self.finished)

    def _read_prompts(self) -> Tensor:
        """Fill the cache with the prompts; returns the logits ``[m, V]`` of the first response token."""
        first = [k for k, row in enumerate(self.prompts) if k == 0 or row != self.prompts[k - 1]]
        ids, mask = pad_left([self.prompts[k] for k in first], self.policy.tokenizer.pad_token_id)
        ids, mask = ids.to(self.rows.device), mask.to(self.rows.device)
        self.pads = (~mask).sum(1)
        self.padded = not bool(mask.all())
        self.column = ids.shape[1]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        last = {"logits_to_keep": 1} if self.policy.model._supports_logits_to_keep() else {}
        copies = torch.tensor([*first[1:], len(self.prompts)]) - torch.tensor(first)
        if len(first) < len(self.prompts):
            self.place = torch.arange(len(first)).repeat_interleave(copies).to(self.rows.device)
        return self._model(ids, mask, positions, **last)

    def _forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[m, V]`` after one further token ``[m]`` in each row of the cache."""
        columns = torch.arange(self.column + 1, device=tokens.device)
        mask, positions = columns >= self.pads[:, None], self.column - self.pads
        self.column += 1
        return self._model(tokens[:, None], mask, positions[:, None])

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

    def _drop_finished(self, tokens: Tensor) -> Tensor:
        """Remove finished rows if that saves time. One row remains while other ranks are still decoding."""
        if len(self.rows) - self.left < self.leave * len(self.rows) or len(self.rows) == 1:
            return tokens
        kept = self._unfinished()
        kept = kept[self.cache.keep_rows(kept)]
        self.rows, self.alive, self.pads = self.rows[kept], self.alive[kept], self.pads[kept]
        self._trim()
        return tokens[kept]

    def _unfinished(self) -> Tensor:
        """Indices of the unfinished rows; one row at least."""
        return self.alive.nonzero().squeeze(1) if self.left else self.alive.new_zeros(1, dtype=torch.long)

    def _fork(self, shared: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
        """Remove finished rows, and give rows that drew different tokens their own rows of the cache.

        `shared` is the row of the cache that each row has used. Returns the tokens ``[m]`` to continue with.
        """
        kept = self._unfinished() if self.leave <= 1 else torch.arange(len(self.rows), device=tokens.device)
        branches, place = torch.unique(shared[kept] * vocabulary + tokens[kept], return_inverse=True)
        parents = branches // vocabulary
        order = torch.arange(len(branches), device=parents.device)
        if len(parents) != len(self.pads) or not torch.equal(parents, order):
            order = self.cache.keep_rows(parents)
        self.pads = self.pads[parents[order]]
        place = order.argsort()[place]
        left = len(kept) < len(self.rows)
        if len(branches) == len(kept):
            kept, self.place = kept[place.argsort()], None
        else:
            self.place = place
        self.rows, self.alive = self.rows[kept], self.alive[kept]
        if left:
            self._trim()
        following: Tensor = branches % vocabulary
        return following[order]

    def _trim(self) -> None:
        """Remove columns that are padding in every remaining row."""
        least, most = (int(pads) for pads in self.pads.aminmax())
        if least and self.cache.drop_columns(least):
            self.pads = self.pads - least
            self.column -= least
            most -= least
        self.padded = most > 0


def draw(logits: Tensor, sampling: Sampling, warpers: Sequence[Any], noise: Tensor) -> tuple[Tensor, Tensor]:
    r"""A token of each row, and its log-probability before top-k and top-p, ``[n]`` each.

    ``token = min {v : Σ_{w ≤ v} p_w > u Σ_w p_w}`` with ``p = exp(logits / temperature)``: one exponential over the
    vocabulary gives both the token and the normaliser.

    Args:
        logits: ``[n, V]``, float32 or float64.
        sampling: The sampling options; temperature 0 takes the most likely token.
        warpers: The processors that set the scores of excluded tokens to -inf; see `warpers`.
        noise: ``[n]`` uniform in ``[0, 1)``: `u`.
    """
    scores = logits / sampling.logprob_temperature
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    if sampling.temperature == 0:
        tokens = scores.argmax(-1)
    else:
        allowed = scores
        for warper in warpers:
            allowed = warper(None, allowed)
        tokens = pick(weights if allowed is scores else (allowed - top).exp(), noise)
    chosen = scores.gather(1, tokens[:, None]) - top
    return tokens, chosen.squeeze(1) - weights.sum(-1).log()


def pick(weights: Tensor, noise: Tensor) -> Tensor:
    """One index ``[n]`` of each row of ``[n, V]``, in proportion to the weights, by inverting their cumulative sum.

    Long rows are summed in blocks, and only the selected block is searched: a cumulative sum over a vocabulary of
    150,000 takes several times as long as a sum.
    """
    if weights.shape[1] <= 4 * _SUM_BLOCK:
        return _invert(weights, noise)[0]
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _SUM_BLOCK)).reshape(len(weights), -1, _SUM_BLOCK)
    block, rest = _invert(blocks.sum(-1), noise)
    row = torch.arange(len(block), device=block.device)
    return block * _SUM_BLOCK + _invert(blocks[row, block], rest)[0]


def _invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The index selected by `noise`, and the position within its weight in [0, 1), which is uniform again."""
    sums = _running_sum(weights, noise.dtype)
    point = (noise * sums[:, -1])[:, None]
    index = torch.searchsorted(sums, point, right=True).clamp(max=weights.shape[1] - 1)
    above = sums.gather(1, index)
    width = weights.gather(1, index).to(noise.dtype)
    rest = 1 - (above - point) / width
    return index.squeeze(1), rest.squeeze(1).clamp(0, 1 - torch.finfo(rest.dtype).eps / 2)


def _running_sum(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The cumulative sum ``[n, V]``. In torch's deterministic mode on CUDA a matrix product replaces `cumsum`."""
    if not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(-1, dtype=dtype)
    return weights.to(dtype) @ weights.new_ones(weights.shape[1], weights.shape[1], dtype=dtype).triu()


def warpers(sampling: Sampling) -> list[Any]:
    """Top-k and top-p, as Transformers defines them."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if sampling.temperature == 0:
        return []
    top_k = [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    return [*top_k, *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else [])]


def _wide(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of the device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

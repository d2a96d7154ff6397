"""Drawing of one token a row from logits, and the rule by which a response ends.

Shapes: ``n`` rows, ``V`` vocabulary, ``T`` response tokens, ``t`` of them so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import Sampling

_SUM_BLOCK = 512


def draw(logits: Tensor, sampling: Sampling, warpers: Sequence[Any], noise: Tensor) -> tuple[Tensor, Tensor]:
    r"""A token of each row of ``[n, V]``, and its log-probability before top-k and top-p, ``[n]`` each.

    ``token = min {v : Σ_{w ≤ v} p_w > u Σ_w p_w}`` with ``p = exp(logits / temperature)`` and the noise ``u [n]``,
    uniform in ``[0, 1)``: one exponential over the vocabulary gives both the token and the normaliser.
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
        tokens = _pick(weights if allowed is scores else (allowed - top).exp(), noise)
    chosen = scores.gather(1, tokens[:, None]) - top
    return tokens, chosen.squeeze(1) - weights.sum(-1).log()


def _pick(weights: Tensor, noise: Tensor) -> Tensor:
    """One index ``[n]`` of each row of ``[n, V]``, in proportion to the weights, by inverting their cumulative sum."""
    # Of long rows only one block is summed cumulatively, which takes several times as long as a sum.
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
    if not torch.are_deterministic_algorithms_enabled():  # CUDA has no deterministic `cumsum`.
        return weights.cumsum(-1, dtype=dtype)
    return weights.to(dtype) @ weights.new_ones(weights.shape[1], weights.shape[1], dtype=dtype).triu()


def warpers(sampling: Sampling) -> list[Any]:
    """Top-k and top-p, as Transformers defines them."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    if sampling.temperature == 0:
        return []
    top_k = [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    return [*top_k, *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else [])]


class Sampled(NamedTuple):
    """The result of a decoding loop."""

    ids: Tensor  # ``[n, T]`` long; ids after a row's end are not part of its response, whatever their value.
    logprobs: Tensor  # ``[n, T]`` float32, the log-probabilities of the ids.
    lengths: Tensor  # ``[n]`` long, the number of tokens of each response, its end included.
    finished: Tensor  # ``[n]`` bool, whether the response ended by itself.


class Ending:
    """Determines which rows end with their newest token: with an end token, or because it completes a stop string.

    Stop strings are compared with the text of all response tokens, special ones included.
    """

    def __init__(self, policy: Policy, sampling: Sampling) -> None:
        from transformers import StopStringCriteria  # Its module is slow to import, and `--help` is not.

        self.end_tokens = torch.tensor(policy.end_token_ids, dtype=torch.long, device=policy.device)
        self.stops = StopStringCriteria(policy.tokenizer, list(sampling.stop)) if sampling.stop else None
        # The number of newest tokens that are read.
        self.reach: int = 1 if self.stops is None else self.stops.maximum_token_len

    def __call__(self, ids: Tensor) -> Tensor:
        """``[n]`` bool: the rows of response tokens ``[n, t]`` that end with their last one."""
        ended: Tensor = (ids[:, -1:] == self.end_tokens).any(1)
        return ended if self.stops is None else ended | self.stops(ids[:, -self.reach :], None)

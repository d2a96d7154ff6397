"""Masked reductions, and log-probabilities without the logits of all positions at one time.

Shapes: ``B`` rows, ``T`` response tokens, ``D`` width, ``V`` vocabulary, ``N`` selected positions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

DEFAULT_CHUNK_TOKENS = 1024

CACHED = 2**20
"""The number of logits that stay in a processor's cache while several passes read them."""

_COMPILED_VOCABULARY = 2**14
"""The vocabulary from which compiling the passes over the logits, some 15 s a process, is worthwhile on a GPU."""


class TokenStats(NamedTuple):
    """Figures of given tokens under the policy."""

    logprobs: Tensor  # The log-probability of each token.
    entropy: Tensor  # The entropy of the distribution that it was drawn from, in nats.
    divergence: Tensor | None = None  # The KL of that distribution to a teacher's; None without a teacher.


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``values`` where ``mask``; values elsewhere, NaN included, are ignored."""
    masked_values = values.masked_fill(~mask, 0)
    return masked_values.sum() if dim is None else masked_values.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``values`` where ``mask``; 0 where the mask is empty."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def running_sum(values: Tensor, dim: int) -> Tensor:
    """The cumulative sum. CUDA has none that is deterministic, so where that is asked for, the CPU computes it."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(dim).to(values.device)
    return values.cumsum(dim)


def masked_zscore(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``(x − mean) / sqrt(var + eps)`` within each row's mask (population variance); ``[B, T]``, 0 outside."""
    mean = masked_mean(values, mask, dim=1)[:, None]
    variance = masked_mean((values - mean).square(), mask, dim=1)[:, None]
    return ((values - mean) / torch.sqrt(variance + eps)).masked_fill(~mask, 0)


def full_precision(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are float64 already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class HeadGradient(NamedTuple):
    """The trainable tensors of a head, for a backward pass that is written by hand."""

    trained: Sequence[Tensor]  # All tensors inside the head that need a gradient.
    # [V, D], if the head is a product with this weight and nothing else. Its gradient is then summed in place.
    weight: Tensor | None = None
    # Whether the backward pass adds this gradient to `weight.grad` itself. Autograd would store a second one of that
    # size, and a third with tied weights. Allowed only if the backward pass of the loss ends at these tensors.
    in_place: bool = False

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that autograd must track."""
        return self.trained if self.weight is None else [self.weight]

    def without_copies(self, hidden: Tensor) -> HeadGradient:
        """The same with `weight` only if the product uses the weight itself: autocast and other dtypes make copies."""
        copied = self.weight is not None and self.weight.dtype != hidden.dtype
        return self._replace(weight=None) if copied or torch.is_autocast_enabled(hidden.device.type) else self


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    head_gradient: HeadGradient | None = None,
) -> Tensor:
    r"""Log-probability of each token, in chunks over tokens.

    .. math:: \log \mathrm{softmax}(\mathrm{head}(h) / \tau)_{y}

    Forward and backward pass store logits of `chunk_tokens` positions at one time. Unless there is only one chunk, the
    backward pass computes its logits again. The softmax is computed in float32 at least, whatever the head's dtype.

    Args:
        hidden: ``[..., D]`` states that predict the tokens (already shifted).
        head: A function from hidden states ``[n, D]`` to logits ``[n, V]``, with the model's bias, scale and soft cap.
        token_ids: ``[...]`` long, the shape of the result.
        temperature: τ; a ValueError if it is not positive.
        chunk_tokens: Positions whose logits exist at one time.
        head_gradient: The head's trainable tensors, for a backward pass written by hand, which is faster; None uses
            autograd.
    """
    options = _Options(temperature, chunk_tokens, with_entropy=False)
    return _chunked(hidden, head, token_ids, options, head_gradient)[0]


def token_stats(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    entropy_gradient: bool = False,
    head_gradient: HeadGradient | None = None,
) -> TokenStats:
    r"""Log-probability of each token, and the entropy of the distribution that it was drawn from.

    .. math:: \log p_y, \qquad H = -\sum_v p_v \log p_v, \qquad p = \mathrm{softmax}(\mathrm{head}(h) / \tau)

    Arguments and precision are those of `token_logprobs`. The entropy carries a gradient with `entropy_gradient` alone,
    which then is autograd's.
    """
    options = _Options(temperature, chunk_tokens, with_entropy=True, entropy_gradient=entropy_gradient)
    return TokenStats(*_chunked(hidden, head, token_ids, options, head_gradient))


class _Options(NamedTuple):
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    entropy_gradient: bool = False


def _chunked(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,
    options: _Options,
    head_gradient: HeadGradient | None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in the shape of the ids; the entropies are 0 if they are not asked for."""
    temperature, chunk_tokens, with_entropy, entropy_gradient = options
    if temperature <= 0:
        raise ValueError(f"`temperature` must be positive, but got {temperature}. Greedy sampling reports at 1.")
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(
            f"`hidden` must be `token_ids` plus a width, but got {tuple(hidden.shape)} and {tuple(token_ids.shape)}."
        )
    states, ids = hidden.reshape(-1, hidden.shape[-1]), token_ids.reshape(-1).long()
    graph = torch.is_grad_enabled()
    # One chunk needs no recomputation to bound its memory.
    recompute = graph and len(ids) > chunk_tokens
    by_hand = None if entropy_gradient or not len(ids) else head_gradient if graph else HeadGradient([])
    if by_hand is not None:
        by_hand = by_hand.without_copies(hidden)
    if by_hand is not None and (recompute or not graph or by_hand.weight is not None):
        chunks = _Chunks(head, temperature, chunk_tokens, with_entropy, by_hand)
        logprobs, entropies = _ChunkedLogprobs.apply(chunks, states, ids, *by_hand.tensors)  # type: ignore[no-untyped-call]
    else:

        def chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = full_precision(head(states)) / temperature
            log_norm = logits.logsumexp(-1)
            chosen = logits.gather(-1, ids[:, None]).squeeze(-1) - log_norm
            if not with_entropy:
                return chosen, chosen.new_zeros(chosen.shape)
            with torch.set_grad_enabled(graph and entropy_gradient):
                # H = log Z − Σ p·z needs one softmax, but no log-softmax of the whole vocabulary.
                return chosen, log_norm - (torch.softmax(logits, -1) * logits).sum(-1)

        logprobs, entropies = in_chunks(chunk, states, ids, chunk_tokens, recompute=recompute)
    return logprobs.reshape(token_ids.shape), entropies.reshape(token_ids.shape)


def in_chunks(
    figures: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    states: Tensor,
    others: Tensor,
    chunk_tokens: int,
    *,
    recompute: bool = False,
) -> tuple[Tensor, ...]:
    """Figures ``[N]`` of each token, computed for `chunk_tokens` tokens at a time, so that few logits exist.

    `others` is what `figures` needs beside the states, in the same order: token ids, or states of another policy. With
    `recompute` the backward pass computes the figures again.
    """
    parts = zip(torch.split(states, chunk_tokens), torch.split(others, chunk_tokens), strict=True)
    results = [checkpoint(figures, *part, use_reentrant=False) if recompute else figures(*part) for part in parts]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


class _Chunks(NamedTuple):
    head: Callable[[Tensor], Tensor]
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    gradient: HeadGradient


def _stats(raw: Tensor, ids: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    """``[n, 3]``: log-probability, logarithm of the normaliser, and entropy (zero unless requested) of each row."""
    logits = _scaled(raw, temperature)
    top = logits.amax(-1, keepdim=True)
    powers = (logits - top).exp_()
    total = powers.sum(-1)
    log_norm = top.squeeze(-1) + total.log()
    chosen = logits.gather(-1, ids[:, None]).squeeze(-1) - log_norm
    entropy = log_norm - powers.mul_(logits).sum(-1) / total if with_entropy else torch.zeros_like(total)
    return torch.stack([chosen, log_norm, entropy], 1)


def _slope(raw: Tensor, ids: Tensor, log_norm: Tensor, grad: Tensor, temperature: float) -> Tensor:
    """``[n, V]``: the gradient with respect to the head's output."""
    scale = (grad / temperature)[:, None]
    slope = (_scaled(raw, temperature) - log_norm[:, None]).exp_().mul_(-scale)
    return slope.scatter_add_(-1, ids[:, None], scale).to(raw.dtype)


def _scaled(raw: Tensor, temperature: float) -> Tensor:
    logits = full_precision(raw)
    return logits if temperature == 1 else logits / temperature


def _fused(function: Callable[..., Tensor], logits: Tensor) -> Callable[..., Tensor]:
    """The function; for a large vocabulary on a GPU compiled, so that it reads the logits two or three times only."""
    large = logits.is_cuda and logits.shape[-1] >= _COMPILED_VOCABULARY
    return _compiled(function) if large else function


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True) if has_compiler() else function


def has_compiler() -> bool:
    """Whether there is a compiler of C, which `torch.compile` needs for its kernels on a GPU."""
    return any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """``[n, V]`` and further tensors of ``n`` rows, a few rows at a time: on a CPU as many as its cache holds."""
    rows = len(logits) if logits.device.type != "cpu" else max(1, CACHED // logits.shape[-1])
    return zip(*(torch.split(tensor, rows) for tensor in (logits, *others)), strict=True)


class _ChunkedLogprobs(torch.autograd.Function):
    r"""Log-probabilities whose backward pass recomputes each chunk's logits, and computes their gradient in one pass.

    .. math:: \partial \log p_y / \partial z_v = (1_{v=y} - p_v) / \tau

    Autograd would read or write ``[n, V]`` a dozen times: for the cast, the division, both directions of the
    log-sum-exp, the gather and its scatter, and for an entropy whose gradient is not needed.
    """

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, states: Tensor, ids: Tensor, *trained: Tensor) -> tuple[Tensor, Tensor]:
        saved_logits, size = states.new_zeros(0), chunks.chunk_tokens
        # Allocated once: small results between large temporaries would fragment the memory.
        results = states.new_empty(len(ids), 3, dtype=full_precision(saved_logits).dtype)
        parts = (torch.split(tensor, size) for tensor in (states, ids, results))
        for part, part_ids, part_results in zip(*parts, strict=True):
            raw = chunks.head(part)
            for *block, result in _blocks(raw, part_ids, part_results):
                result.copy_(_fused(_stats, block[0])(*block, chunks.temperature, chunks.with_entropy))
            saved_logits = raw if chunks.gradient.weight is not None and len(ids) <= size else saved_logits
            del raw, block  # Freed before the next chunk's are made.
        chosen, log_norm, entropy = results.T.contiguous()
        ctx.chunks, ctx.device_type = chunks, states.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type), torch.get_autocast_dtype(ctx.device_type)
        ctx.save_for_backward(states, ids, log_norm, saved_logits, *trained)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        states, ids, log_norm, saved_logits, *trained = ctx.saved_tensors
        chunks: _Chunks = ctx.chunks
        size, (enabled, dtype) = chunks.chunk_tokens, ctx.autocast
        wanted = [t for t, needed in zip(trained, ctx.needs_input_grad[3:], strict=True) if needed]
        add_up = chunks.gradient.weight is not None and chunks.gradient.in_place
        # Clipped tokens and those of weight zero have no gradient. On CUDA the host would wait for their number, and a
        # gap in the backward pass costs more than these tokens.
        parts: Sequence[Tensor | slice] = [slice(begin, begin + size) for begin in range(0, len(grad), size)]
        chosen = grad.device.type == "cpu"
        if chosen:
            parts = torch.split(grad.nonzero().squeeze(-1), size)
        state_grad = torch.zeros_like(states)
        # A tensor saved for this pass may have been unpacked as a copy, whose gradient would be lost.
        parameters = [chunks.gradient.weight] if chunks.gradient.weight is not None and wanted else wanted
        sums = [gradient_so_far(t) if add_up else torch.zeros_like(t) for t in parameters]
        for rows in parts:
            part, statistics = states[rows], (ids[rows], log_norm[rows], grad[rows])
            if chunks.gradient.weight is not None:
                if not len(saved_logits):
                    slope = chunks.head(part)
                else:  # A copy, which is written into; there is one chunk.
                    slope = saved_logits[rows] if chosen else saved_logits.clone()
                for block in _blocks(slope, *statistics):
                    block[0].copy_(_fused(_slope, block[0])(*block, chunks.temperature))
                state_grad[rows] = slope @ chunks.gradient.weight
                for total in sums:
                    total.addmm_(slope.T, part)
                del slope, block  # Freed before the next chunk's is made.
                continue
            with torch.enable_grad(), torch.autocast(ctx.device_type, dtype=dtype, enabled=enabled):
                leaf = part.detach().requires_grad_(True)
                raw = chunks.head(leaf)
            slope = _fused(_slope, raw)(raw.detach(), *statistics, chunks.temperature)
            of_states, *of_trained = torch.autograd.grad(raw, [leaf, *wanted], slope)
            state_grad[rows] = of_states
            for total, addend in zip(sums, of_trained, strict=True):
                total += addend
            del raw, slope, of_trained
        gradients = iter([None] * len(sums) if add_up else sums)
        of_parameters = [next(gradients) if needed else None for needed in ctx.needs_input_grad[3:]]
        return None, state_grad, None, *of_parameters


def gradient_so_far(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, to which others are added; zeros are allocated if there is none yet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

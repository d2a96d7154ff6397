"""What decoder blocks and decoding allocate, found by running them on tensors without data.

The blocks are the model's own, with the attention, the layouts and the cache of this package. A stack of one block and
a stack of two are run; each further block adds what the second one added.

Shapes: ``b`` rows, ``N`` places for tokens, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from grail_lightning.credit.saliency import explaining
from grail_lightning.engines.cache import GrowingCache, can_drop_rows
from grail_lightning.engines.draw import draw, warpers
from grail_lightning.engines.hf import weights_cast_once
from grail_lightning.functional.tokens import full_precision
from grail_lightning.plan.live import Live
from grail_lightning.plan.rows import MicroShape
from grail_lightning.plan.settings import Settings
from grail_lightning.plan.shapes import build, give_sizes, without_data
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import TokenLayout
from grail_lightning.policy.trees import by_units

Gradient = Literal["weights", "embeddings", "none"]

FORCE_GQA = "TRANSFORMERS_SDPA_FORCE_GQA"


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of the blocks' tensors in the forward and the backward pass of a micro-batch.

    Attributes:
        held: What the backward pass needs, when the forward pass has ended.
        peak: The most at any time, gradients of the weights excluded except for the one that is being added.
        state: Bytes of an element of the decoder's output.
    """

    held: int
    peak: int
    state: int


@dataclass(frozen=True, kw_only=True)
class DecodingBytes:
    """Bytes of decoding.

    Attributes:
        cached_token: Keys and values of one token in all blocks.
        prompts: What the forward pass of the prompts allocates besides.
        step: What a step allocates besides: its forward pass, and the drawing of tokens.
    """

    cached_token: int
    prompts: int
    step: int


def trace_blocks(
    config: PreTrainedConfig, settings: Settings, shape: MicroShape, blocks: int, gradient: Gradient
) -> Activations:
    """Run the decoder blocks of a micro-batch forward and, with a gradient, backward.

    Args:
        config: The model's config.
        settings: The options of the run.
        shape: The sizes of the micro-batch.
        blocks: The number of blocks.
        gradient: The gradient of the trained weights, that of the embeddings alone (saliency), or none.
    """
    one, two = (_run_blocks(config, settings, shape, number, gradient) for number in (1, 2))
    held, peak = (a + (blocks - 1) * (b - a) for a, b in zip(one[:2], two[:2], strict=True))
    return Activations(held=held, peak=peak, state=one[2])


def _run_blocks(
    config: PreTrainedConfig, settings: Settings, shape: MicroShape, blocks: int, gradient: Gradient
) -> tuple[int, int, int]:
    with without_data(), _grouped_heads(settings), _computing(settings):
        policy = give_sizes(build(config, settings, blocks=blocks))
        for parameter in policy.parameters():
            if parameter.requires_grad:
                # The sum over micro-batches exists already, and is counted elsewhere.
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        table: Tensor = policy.model.get_input_embeddings().weight
        leaf = gradient == "embeddings" or (gradient == "weights" and table.requires_grad)
        if shape.trees == "flex" or settings.loading.attention == "flash_attention_2":
            policy.model.set_attn_implementation(FUSED)
        layout = _layout(shape)
        mode = nullcontext() if gradient == "weights" else explaining(policy)
        with mode, torch.set_grad_enabled(gradient != "none"), Live() as live:
            embeds = torch.empty(*layout.ids.shape, table.shape[1], dtype=table.dtype, requires_grad=leaf)
            states = policy.decode(layout, embeds)
            held = live.now
            if states.requires_grad:
                inputs = [embeds] if gradient == "embeddings" else None
                torch.autograd.backward(states, torch.empty_like(states), inputs=inputs)
        return held, live.peak, states.element_size()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _layout(shape: MicroShape) -> TokenLayout:
    """The layout of a micro-batch of these sizes, without data."""
    rows = 1 if shape.trees is not None else shape.rows
    ids = torch.empty(rows, shape.tokens // rows, dtype=torch.long)
    flat = ids.flatten()
    return TokenLayout(
        ids=ids,
        positions=ids,
        predictors=flat,
        targets=flat,
        places=flat,
        prediction_of=flat,
        source_of=flat,
        response_mask=torch.empty(ids.shape, dtype=torch.bool),
        attention=lambda dtype: _attention(shape, ids, dtype),
        num_tokens=shape.tokens,
    )


def _attention(shape: MicroShape, ids: Tensor, dtype: torch.dtype) -> Mapping[str, Any]:
    """The decoder's arguments, as those of prefix trees and of padded rows."""
    if shape.units is None:
        return {"attention_mask": torch.empty_like(ids)}
    number, queries, keys = shape.units
    units = (
        torch.empty(number, queries, dtype=torch.long),
        torch.empty(number, keys, dtype=torch.long),
        torch.empty(number, queries, keys, dtype=torch.bool),
        torch.empty(shape.tokens, dtype=torch.long),
    )
    return by_units(units, ids.device)(dtype)


def trace_decoding(
    config: PreTrainedConfig, settings: Settings, blocks: int, *, prompts: int, rows: int, width: int
) -> DecodingBytes:
    """Run the prompts of one call of the engine, one step of its rows, and the drawing of their tokens.

    Args:
        config: The model's config.
        settings: The options of the run.
        blocks: The number of blocks.
        prompts: Different prompts of the call.
        rows: Rows of the call.
        width: The most tokens of a row.
    """
    with without_data(), _grouped_heads(settings), _computing(settings), torch.no_grad(), ExitStack() as cast:
        policy = give_sizes(build(config, settings, blocks=1)).eval()
        cast.enter_context(weights_cast_once(policy))
        _forward(policy, DynamicCache(), 1, 1, 0)  # The cast weights are counted elsewhere.
        text = policy.model.config.get_text_config(decoder=True)
        if not can_drop_rows(text):
            raise NotImplementedError("it keeps more than keys and values")
        cache = GrowingCache(text, width, rows)
        length = width - settings.sampling.max_response_length
        with Live() as live:
            first = _forward(policy, cache, prompts, length, 0, logits_to_keep=1)
            del first
        read = live.peak - live.now
        (layer,) = cache.layers
        keys, values = layer.keys, layer.values
        # The same cache, nearly full: its tensors have room for the last token.
        cache = GrowingCache(text, width, rows)
        cache.layers[0].update(_filled(keys, rows, width - 1), _filled(values, rows, width - 1))
        with Live() as live:
            logits = full_precision(_forward(policy, cache, rows, 1, width - 1)[:, -1])
            draw(logits, settings.sampling, warpers(settings.sampling), torch.zeros(rows, dtype=torch.float64))
    token = sum(t.shape[1] * t.shape[-1] * t.element_size() for t in (keys, values))
    return DecodingBytes(cached_token=token * blocks, prompts=max(0, read), step=live.peak)


def _filled(states: Tensor, rows: int, length: int) -> Tensor:
    return states.new_empty(rows, states.shape[1], length, states.shape[-1])


def _forward(policy: Policy, cache: Cache, rows: int, tokens: int, begun: int, **options: int) -> Tensor:
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    mask = torch.ones(rows, begun + tokens, dtype=torch.long)
    out = policy.model(
        input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True, **options
    )
    logits: Tensor = out.logits
    return logits


def _fused_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Attention that keeps what flash-attn and `flex_attention` keep: queries, keys, values and output, but no mask."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2), None


FUSED = "planned_fused"
AttentionInterface.register(FUSED, _fused_attention)
AttentionMaskInterface.register(FUSED, lambda **options: None)


@contextmanager
def _computing(settings: Settings) -> Iterator[None]:
    """Autocast as Lightning's plugin uses it, if the run does."""
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast, cache_enabled=False):
        yield


@contextmanager
def _grouped_heads(settings: Settings) -> Iterator[None]:
    """SDPA of the run's device: CPUs attend with grouped heads, GPUs copy keys and values for each head of a query."""
    before = os.environ.get(FORCE_GQA)
    flash = settings.loading.attention == "flash_attention_2"
    os.environ[FORCE_GQA] = str(int(settings.device == "cpu" or flash))
    try:
        yield
    finally:
        os.environ.pop(FORCE_GQA) if before is None else os.environ.update({FORCE_GQA: before})

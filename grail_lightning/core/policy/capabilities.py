"""What a policy's model supports beyond padded rows, found by running it on a few tokens; and continued sequences.

Shapes: ``B`` rows, ``W`` columns, ``n`` branches, ``D`` width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.func import functional_call
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from grail_lightning.core.policy.compile import SHOWN_OF_ERROR, CompiledBlocks, chosen_backend
from grail_lightning.core.policy.layout import TokenLayout, packed_layout, padded_layout
from grail_lightning.core.policy.trees import TREE_ATTENTION, TreeKernel, tree_layout
from grail_lightning.core.policy.weights import CastsWeights, requiring_grad
from grail_lightning.core.runtime.guard import said_in_a_line

_TRIAL_WEIGHTS = 2**24  # The number of weights, besides those that are zero, whose gradients a trial run compares.


class _Policy(CastsWeights, Protocol):
    """The further parts that trial runs and continued sequences use."""

    model: Any
    loading: Any

    @property
    def uses_flash(self) -> bool: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def trial(self, rows: int, columns: int) -> AbstractContextManager[tuple[Tensor, Tensor]]: ...
    def eager_attention(self) -> AbstractContextManager[None]: ...
    @property
    def blocks(self) -> nn.ModuleList: ...
    @property
    def tree_kernel(self) -> TreeKernel | None: ...
    def decode(self, layout: TokenLayout, embeds: Tensor | None = None, *, compiled: bool = True) -> Tensor: ...
    def hidden(
        self,
        attention_mask: Tensor,
        input_ids: Tensor,
        *,
        embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor: ...


def find_tree_kernel(policy: _Policy) -> TreeKernel | None:
    """What computes attention in prefix trees; None if the model does not support them."""
    on_cuda = policy.device.type == "cuda"
    kernels: tuple[TreeKernel, ...] = ("varlen", "sdpa") if on_cuda else ("sdpa",)
    if policy.model.config._attn_implementation != TREE_ATTENTION:
        kernels = ()
    kernel = next((kernel for kernel in kernels if _supports_prefix_trees(policy, kernel)), None)
    if kernel is None:
        rank_zero_info("This policy cannot share prefixes as it is loaded: every row is run separately.")
    elif on_cuda:
        rank_zero_info(f"Attention in prefix trees is computed by {kernel}.")
    return kernel


def _supports_prefix_trees(policy: _Policy, kernel: TreeKernel) -> bool:
    """Whether rows in a prefix tree have the log-probabilities and gradients that they have when run separately.

    Recurrent states and convolutions mix neighbouring rows.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    try:
        # Lightning evaluates in inference mode, whose tensors cannot be differentiated.
        with torch.inference_mode(False), policy.trial(3, 9) as (ids, mask), requiring_grad(trained, False):
            ids[1, :6], ids[2, :8] = ids[0, :6], ids[0, :8]
            mask[:, 0] = mask[1, 7:] = False
            rows, weights = (ids, mask, mask[:, 4:]), _trial_weights(policy)
            layouts = padded_layout(*rows), tree_layout(*rows, [0], kernel=kernel)
            (whole, apart), (tree, together) = (_differentiate(policy, weights, layout) for layout in layouts)
    except Exception:
        return False
    dtype = policy.compute_dtype
    # Rounding may exceed the gradient of one weight, but a weight that trees leave out has none at all.
    lost = any(not joint.any() and separate.any() for joint, separate in zip(together, apart, strict=True))
    gap = _length([joint - separate for joint, separate in zip(together, apart, strict=True)])
    rounding = max(torch.finfo(kind).eps for kind in (dtype, torch.float32))  # Norms run in float32.
    close = gap < rounding**0.5 * _length(apart)
    return close and not lost and agree(tree, whole, spread=whole - whole.mean(), dtype=dtype)


def _trial_weights(policy: _Policy) -> dict[str, Tensor]:
    """Copies of the smallest weights, and other values for those that are zero, which would change nothing else."""
    weights: dict[str, Tensor] = {}
    room = _TRIAL_WEIGHTS
    for name, p in sorted(policy.named_parameters(), key=lambda named: named[1].numel()):
        room -= p.numel()
        if not p.is_floating_point():
            continue
        if p[(0,) * p.ndim] == 0 and not p.any():
            moved = torch.linspace(-0.02, 0.02, p.numel(), dtype=p.dtype, device=p.device)
            weights[name] = moved.view_as(p).requires_grad_()
        elif room >= 0 or not weights:
            weights[name] = p.detach().clone().requires_grad_()
    return weights


@torch.enable_grad()
def _differentiate(policy: _Policy, weights: dict[str, Tensor], layout: TokenLayout) -> tuple[Tensor, list[Tensor]]:
    """The log-probabilities of a layout's tokens with some weights replaced, and the gradients of these weights."""
    plain = {"decode": partial(policy.decode, compiled=False)}
    logprobs = functional_call(cast(nn.Module, policy), weights, (layout,), plain)[layout.response_mask]
    gradients = torch.autograd.grad(logprobs.sum(), list(weights.values()), materialize_grads=True)
    # The embeddings of an earlier fit may still hand on sparse gradients.
    return logprobs.detach(), [gradient.to_dense() for gradient in gradients]


def find_compiled_blocks(policy: _Policy) -> CompiledBlocks | None:
    """The policy's blocks, compiled; None if they are left as they are, or if a trial fails, which one line says."""
    backend = chosen_backend(policy.loading.compile, policy.device)
    if backend is None:
        return None
    try:
        blocks = CompiledBlocks(policy.blocks, backend)
        failed = _wrong_if_compiled(policy, blocks)
    except Exception as error:  # Compilers raise many types.
        failed = said_in_a_line(error, SHOWN_OF_ERROR)
    if failed is None:
        rank_zero_info(f"The decoder's blocks are compiled ({backend}); the first passes of each kind take longer.")
        return blocks
    rank_zero_info(f"The decoder's blocks cannot be compiled and run as they are ({failed}).")
    return None


def _wrong_if_compiled(policy: _Policy, blocks: CompiledBlocks) -> str | None:
    """What differs in a small pass through compiled blocks, forward and backward; None if nothing does.

    Gradients are those of the first block's weights, which come through all blocks. More would take as much memory as a
    whole model, before the weights are sharded.
    """
    weights = [p for p in policy.blocks[0].parameters() if p.requires_grad]
    with torch.inference_mode(False), policy.trial(3, 24) as (ids, mask):
        ids[1:, :10] = ids[0, :10]
        mask[0, 0] = mask[1, 20:] = False
        rows = ids, mask, mask[:, 8:]
        layout = padded_layout(*rows)
        if policy.loading.packing:
            layout = packed_layout(*rows, flash=policy.uses_flash)
        elif policy.tree_kernel is not None:
            layout = tree_layout(*rows, [0], kernel=policy.tree_kernel)
        plain, apart = _pass_of_trial(policy, layout, weights)
        with blocks.running():
            ours, compiled = _pass_of_trial(policy, layout, weights)
    dtype = max(policy.compute_dtype, torch.float32, key=lambda kind: torch.finfo(kind).eps)  # Norms run in float32.
    if not agree(ours, plain, spread=plain - plain.mean(), dtype=dtype):
        return "log-probabilities differ"
    pairs = zip(compiled, apart, strict=True)
    return None if all(agree(a, b, spread=b, dtype=dtype) or not b.any() for a, b in pairs) else "gradients differ"


@torch.enable_grad()
def _pass_of_trial(policy: _Policy, layout: TokenLayout, weights: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """The log-probabilities of a layout's tokens, and the gradients of some weights as one tensor, if there are any."""
    run = cast(Callable[..., Tensor], policy)
    logprobs = run(layout, decode=partial(policy.decode, compiled=False))[layout.response_mask]
    parts = torch.autograd.grad(logprobs.sum(), weights, materialize_grads=True) if weights else ()
    return logprobs.detach(), [torch.cat([part.flatten() for part in parts])] if parts else []


def supports_kv_continuation(policy: _Policy) -> bool:
    """Whether the model computes the same from cached keys and values as from the whole sequence.

    Recurrent states cannot be cut at a column, and some layers keep more than keys and values.
    """
    if getattr(policy.model, "_is_stateful", False):
        return False
    try:
        with policy.trial(2, 9) as (ids, mask):
            mask[1, :2] = False
            whole = policy.hidden(mask, ids)[:, 5:].float()
            cache = DynamicCache()
            policy.hidden(mask[:, :5], ids[:, :5], past_key_values=cache)
            continued = policy.hidden(mask, ids, past_key_values=cache).float()
    except Exception:
        return False
    return agree(continued, whole, spread=whole, dtype=policy.compute_dtype)


def cache_argument(model: nn.Module) -> str:
    """The name under which a model or its decoder takes a cache: the first one since Transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Trunk:
    """A forward pass of whole sequences whose keys and values can be continued from any column.

    `states` ``[B, W, D]`` is the decoder's output for ``input_ids [B, W]``, padded left or right. The policy must be in
    evaluation mode, without gradients, and must have `supports_kv_continuation`.
    """

    def __init__(self, policy: _Policy, input_ids: Tensor, attention_mask: Tensor) -> None:
        cache = DynamicCache()
        self.policy, self.input_ids = policy, input_ids
        self.states = policy.hidden(attention_mask, input_ids, past_key_values=cache)
        self._layers = [(layer.keys, layer.values) for layer in cache.layers]

    def branch(self, rows: Tensor, columns: slice, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The decoder's output ``[n, w, D]`` at tokens ``input_ids [n, w]`` that replace the end of ``rows [n]``.

        Keys and values of the range `columns` are kept; what is left of it must be padding. The `attention_mask`
        ``[n, kept + w]`` has columns for both.
        """
        layers: list[Any] = [_Beginning(*layer, rows, columns) for layer in self._layers]
        ids = torch.cat([self.input_ids[rows, columns], input_ids], 1)
        return self.policy.hidden(attention_mask, ids, past_key_values=Cache(layers=layers))


class _Beginning(DynamicLayer):  # type: ignore[misc]  # Transformers has no types.
    """One cache layer with the keys and values of the beginnings. `update` does not change what is stored."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: slice) -> None:
        super().__init__()
        self.keys, self.values = keys[:, :, columns], values[:, :, columns]
        self.rows, self.is_initialized = rows, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[self.rows].to(key_states.dtype), self.values[self.rows].to(value_states.dtype)
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


def within_attention_window(policy: _Policy, width: int) -> bool:
    """Whether every block attends to `width` columns: sliding windows count them, not the depth in a prefix tree."""
    config = policy.model.config.get_text_config()
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return all(window is None or width <= window for window in windows)


def has_dropout(policy: nn.Module) -> bool:
    """Whether some module may draw random numbers in training mode. Many modules keep a dropout rate as a number."""

    def rates(module: nn.Module) -> list[object]:
        named = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
        return [*named, module.p] if isinstance(module, nn.Dropout) else named

    return any(isinstance(rate, int | float) and rate > 0 for module in policy.modules() for rate in rates(module))


def check_padding(policy: _Policy) -> None:
    """Check that padding does not change a row: some architectures count columns, or compress windows of them."""
    pads = 3
    with policy.trial(2, 12) as (ids, mask), policy.eager_attention():
        ids[1, pads:] = ids[0, :-pads]
        mask[0, -pads:] = mask[1, :pads] = False
        states = policy.hidden(mask, ids).float()
    if error := _difference(states[1, pads:], states[0, :-pads], policy.model.dtype):
        raise ValueError(
            f"`policy` must give a row the same log-probabilities behind padding, but {type(policy.model).__name__} "
            f"does not (relative difference {error:.3g}): rows would depend on others. Take another model."
        )


def check_packing(policy: _Policy) -> None:
    """Check that packed rows are as when run one by one: some architectures pass information to the next row."""
    with policy.trial(3, 5) as (ids, mask), policy.eager_attention() if policy.uses_flash else nullcontext():
        mask[0, 0] = mask[1, 4:] = False
        rows = ids, mask, mask[:, 2:]
        layouts = packed_layout(*rows, flash=False), padded_layout(*rows)
        states = [layout.at_predictors(policy.decode(layout, compiled=False)).float() for layout in layouts]
    together, alone = states
    if error := _difference(together, alone, policy.model.dtype):
        raise ValueError(
            f"`loading.packing` needs rows that do not attend to each other, but in {type(policy.model).__name__} they "
            f"do (relative difference {error:.3g}). Leave packing off for this architecture."
        )


def _difference(result: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The relative difference of two results; 0 if rounding can explain it, and NaN if one is not finite."""
    error = float((result - expected).norm() / expected.norm())
    return 0.0 if error < torch.finfo(dtype).eps ** 0.5 else error


def _length(parts: list[Tensor]) -> float:
    lengths = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return float(torch.linalg.vector_norm(lengths))


def agree(result: Tensor, expected: Tensor, *, spread: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results differ by rounding alone, measured against the variation of the expected result."""
    return bool((result - expected).norm() < torch.finfo(dtype).eps ** 0.5 * spread.norm())

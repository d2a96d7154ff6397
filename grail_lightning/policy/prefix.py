"""Sequences that begin alike: the common beginning is run once, the rest continues from its keys and values.

Shapes: ``B`` rows, ``P`` prompt tokens, ``T`` response tokens, ``W`` columns, ``n`` branches, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from grail_lightning.functional.tokens import full_precision
from grail_lightning.policy.compiled import Cached
from grail_lightning.policy.model import Policy
from grail_lightning.rollout import RolloutBatch


def can_share(policy: Policy) -> bool:
    """Whether the model goes on behind keys and values as it does in a whole sequence; tried once.

    Recurrent states cannot be cut at a column, some layers keep more than keys and values, and some models insist on a
    cache of their own.
    """
    if getattr(policy.model, "_is_stateful", False):
        return False
    if policy.continues is None:
        policy.continues = _continues(policy)
    return policy.continues


def _continues(policy: Policy) -> bool:
    """Compare the last columns of two rows, one of them padded on the left, with those of whole sequences."""
    try:
        with policy.trial(2, 9) as (ids, mask), torch.compiler.set_stance("force_eager"):
            mask[1, :2] = False
            whole = policy.hidden(mask, input_ids=ids)[:, 5:].float()
            rows = torch.arange(2, device=policy.device)
            trunk = Trunk(policy, ids, mask)
            found = trunk.branch(rows, slice(0, 5), ids[:, 5:], mask).float()
    except Exception:  # Whatever a model says that wants another cache.
        return False
    return bool((found - whole).norm() < torch.finfo(policy.compute_dtype).eps ** 0.5 * whole.norm())


def can_share_prompts(policy: Policy) -> bool:
    """Whether `SharedPrompts` may stand in for whole rows in training.

    Not with dropout (every row has its own), packed blocks, checkpointed blocks (they refuse a cache) and
    sharded ones (FSDP frees weights after a backward pass); with flash-attn it has not been tried.
    """
    return may_share(policy) and graphs_last(policy) and can_share(policy)


def may_share(policy: Policy) -> bool:
    """Whether rows are padded, attention takes a mask, and nothing is random: what any way of sharing needs."""
    masked = not policy.loading.packing and policy.model.config._attn_implementation in ("sdpa", "eager")
    return masked and not (policy.training and drops_out(policy))


def graphs_last(policy: Policy) -> bool:
    """Whether a graph is whole until its last backward pass: no checkpointed blocks (run again in it), none sharded."""
    return not any(isinstance(m, FSDPModule) or getattr(m, "gradient_checkpointing", False) for m in policy.modules())


def drops_out(policy: Policy) -> bool:
    """Whether some module may be random in training mode."""
    return any(_drops_out(module) for module in policy.modules())


def _drops_out(module: nn.Module) -> bool:
    """Besides dropout modules, many keep a rate as a number."""
    rates = [value for name, value in vars(module).items() if "drop" in name or "jitter" in name]
    rates += [module.p] if isinstance(module, nn.Dropout) else []
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


class Trunk:
    """A forward pass of whole sequences, from any column of which others can branch off.

    Holds the keys and values of ``B × W`` positions. Needs evaluation mode and no gradient.

    Args:
        policy: Which policy.
        input_ids: ``[B, W]``, padded left or right.
        attention_mask: ``[B, W]`` bool.

    Attributes:
        states: ``[B, W, D]``, the decoder's output.
    """

    def __init__(self, policy: Policy, input_ids: Tensor, attention_mask: Tensor) -> None:
        cache = DynamicCache()
        self.policy = policy
        self.states = policy.hidden(attention_mask, input_ids=input_ids, behind=cache)
        self._layers = [(layer.keys, layer.values) for layer in cache.layers]

    def branch(self, rows: Tensor, columns: slice, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The decoder's output at other tokens behind a part of some rows.

        Args:
            rows: ``[n]`` long, from which row each branches off.
            columns: What of the trunk's columns is kept; those cut off on the left must be padding.
            input_ids: ``[n, w]``, what follows.
            attention_mask: ``[n, kept + w]`` bool.

        Returns:
            ``[n, w, D]``.
        """
        layers: list[Any] = [_Beginning(*layer, rows, columns) for layer in self._layers]
        return self.policy.hidden(attention_mask, input_ids=input_ids, behind=Cache(layers=layers))


class SharedPrompts:
    """The prompts of some rollouts, each read once for all of its responses, with gradient where that is on.

    All tokens of a prompt but its last, which predicts the first response token and so belongs to the row. All
    micro-batches but the last continue from detached keys and values, whose gradients add up there (in float32 at
    least); the last one from the keys and values themselves, and its backward pass takes the others' share along,

        ∂L/∂θ = Σ_m ∂L_m/∂θ + Σ_kv (Σ_m ∂L_m/∂kv) · ∂kv/∂θ.

    Args:
        policy: For which `can_share_prompts`.
        batch: ``B`` rows.
        rows: ``[n]`` long, those that may come to be asked for.
    """

    def __init__(self, policy: Policy, batch: RolloutBatch, rows: Tensor) -> None:
        self.policy, self.batch = policy, batch
        self.rows = rows.sort().values
        group = batch.group.cpu()[self.rows]
        numbers, self._owner = torch.unique(group, return_inverse=True)
        self._first = self.rows[(group == numbers[:, None]).int().argmax(1)]
        self._read: list[tuple[Tensor, Tensor]] = []
        self._leaves: list[tuple[Tensor, Tensor]] = []

    @property
    def tokens(self) -> int:
        """How many are run in advance."""
        return int((self.batch.prompt_lengths.cpu()[self._first] - 1).sum())

    def behind(self, rows: Tensor, width: int, *, last: bool) -> Cache:
        """What some rows' last prompt tokens and responses continue from.

        Args:
            rows: ``[b]`` long.
            width: Prompt columns of their micro-batch, the last prompt token's included.
            last: Whether no other micro-batch follows.
        """
        self._read = self._read or self._run()
        if not last and not self._leaves:
            self._leaves = [(_leaf(keys), _leaf(values)) for keys, values in self._read]
        index = self._owner[torch.searchsorted(self.rows, rows)].to(self.batch.input_ids.device)
        read = self._read[0][0].shape[-2]
        columns = slice(read - (width - 1), read)
        source = [(_summing(keys), _summing(values)) for keys, values in self._read] if last else self._leaves
        if last and not torch.is_grad_enabled():
            self._read = []
        return Cache(layers=[_Beginning(*layer, index, columns) for layer in source])

    def outstanding(self) -> Tensor | float:
        """A scalar whose gradient is what the micro-batches so far have left to do; add it to the last one's loss.

        Nothing is kept afterwards.
        """
        pairs = zip(self._read, self._leaves, strict=True) if self._leaves else ()
        tensors = [pair for layer, leaf in pairs for pair in zip(layer, leaf, strict=True)]
        self._read, self._leaves = [], []
        return sum(((t * leaf.grad).sum() for t, leaf in tensors if leaf.grad is not None), 0.0)

    def _run(self) -> list[tuple[Tensor, Tensor]]:
        piece = self.batch.select(self._first)
        columns = slice(0, piece.prompt_width - 1)
        cache = DynamicCache()
        self.policy.hidden(piece.attention_mask[:, columns], input_ids=piece.input_ids[:, columns], behind=cache)
        return [(layer.keys, layer.values) for layer in cache.layers]


def _summing(tensor: Tensor) -> Tensor:
    """Gradients of many rows add up here: in half precision the later ones would round to nothing."""
    return full_precision(tensor) if tensor.requires_grad else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return _summing(tensor).detach().requires_grad_(tensor.requires_grad)


class Joined:
    """One layer's keys and values of some beginnings, as a decoder block meets them.

    Args:
        keys: ``[B, heads, kept, D / heads]``.
        values: Likewise.
        rows: ``[n]`` long, which row each continuation belongs to.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        self.keys, self.values, self.rows = keys, values, rows

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Beginning and continuation, ``[n, heads, kept + w, D / heads]`` each; autograd keeps the copy."""
        keys, values = self.keys[self.rows].to(key_states.dtype), self.values[self.rows].to(value_states.dtype)
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


class _Beginning(DynamicLayer):  # type: ignore[misc]  # Transformers has no types.
    """`Joined` as a layer of a cache."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: slice) -> None:
        super().__init__()
        self.keys, self.values = keys[:, :, columns], values[:, :, columns]
        self.rows, self.is_initialized = rows, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As `Joined`."""
        return Joined(self.keys, self.values, self.rows).update(key_states, value_states)

    @contextmanager
    def traced(self, number: int) -> Iterator[Cached]:
        """For a block that is compiled: what joins beginning and continuation."""
        yield Joined, (self.keys, self.values, self.rows)

"""Sequences that begin alike: the common beginning is run once, the rest continues from its keys and values.

Shapes: ``B`` rows, ``W`` columns, ``n`` branches, ``D`` width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from grail_lightning.policy import Policy


def can_share(policy: Policy) -> bool:
    """Whether the model keeps keys and values of every position: recurrent states cannot be cut at a column."""
    return not getattr(policy.model, "_is_stateful", False)


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
        self.states = _continue(policy, input_ids, attention_mask, cache)
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
        return _continue(self.policy, input_ids, attention_mask, Cache(layers=layers))


class _Beginning(DynamicLayer):  # type: ignore[misc]  # Transformers has no types.
    """One layer's keys and values of the trunk, copied for the branches when the layer runs and not kept."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: slice) -> None:
        super().__init__()
        self.keys, self.values = keys[:, :, columns], values[:, :, columns]
        self.rows, self.is_initialized = rows, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Beginning and continuation, ``[n, heads, kept + w, D / heads]`` each."""
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys[self.rows], self.values[self.rows]
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


def _continue(policy: Policy, input_ids: Tensor, attention_mask: Tensor, cache: Cache) -> Tensor:
    """`Policy.hidden` behind what the cache holds."""
    positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    out = policy.decoder(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    states: Tensor = out.last_hidden_state
    return states

"""Sequences with a common beginning: it is run once, and each continuation reuses its keys and values.

Shapes: ``B`` rows, ``W`` columns, ``n`` branches, ``D`` width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from grail_lightning.policy.model import Policy


class Trunk:
    """A forward pass of whole sequences whose keys and values can be continued from any column.

    It stores the keys and values of ``B × W`` positions. The policy must be in evaluation mode, without gradients, and
    must have `supports_kv_continuation`.

    Args:
        policy: The policy that runs the sequences.
        input_ids: ``[B, W]``, padded left or right.
        attention_mask: ``[B, W]`` bool.

    Attributes:
        states: ``[B, W, D]``, the decoder's output.
    """

    def __init__(self, policy: Policy, input_ids: Tensor, attention_mask: Tensor) -> None:
        cache = DynamicCache()
        self.policy = policy
        self.states = policy.hidden(attention_mask, input_ids=input_ids, past_key_values=cache)
        self._layers = [(layer.keys, layer.values) for layer in cache.layers]

    def branch(self, rows: Tensor, columns: slice, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The decoder's output at tokens that replace the end of some rows.

        Args:
            rows: ``[n]`` long, the row that each branch continues.
            columns: The range of columns whose keys and values are kept. Columns cut off on the left must be padding.
            input_ids: ``[n, w]``, the tokens of the branch.
            attention_mask: ``[n, kept + w]`` bool.

        Returns:
            ``[n, w, D]``.
        """
        layers: list[Any] = [_Beginning(*layer, rows, columns) for layer in self._layers]
        return self.policy.hidden(attention_mask, input_ids=input_ids, past_key_values=Cache(layers=layers))


class _Beginning(DynamicLayer):  # type: ignore[misc]  # Transformers has no types.
    """One cache layer with the keys and values of the beginnings. `update` does not change what is stored."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: slice) -> None:
        super().__init__()
        self.keys, self.values = keys[:, :, columns], values[:, :, columns]
        self.rows, self.is_initialized = rows, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        """The keys and the values of beginning and continuation, ``[n, heads, kept + w, D / heads]`` each."""
        keys, values = self.keys[self.rows].to(key_states.dtype), self.values[self.rows].to(value_states.dtype)
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)

"""A key/value cache that grows in blocks, and whose rows can leave.

Shapes: ``n`` rows, ``H`` key/value heads, ``L`` cached tokens, ``d`` head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 64


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`DynamicLayer` with room behind its last token: a step writes one column instead of copying the whole cache.

    Args:
        limit: Most tokens of a row; no room is made beyond it.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[n, H, t, d]``; all keys and all values ``[n, H, L+t, d]``, as views of the room."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._room is None or stop > self._room[0].shape[-2]:
            self._grow(key_states, value_states, start, max(stop, min(self.limit, stop + max(BLOCK, stop // 4))))
        assert self._room is not None
        self._room[0][..., start:stop, :] = key_states
        self._room[1][..., start:stop, :] = value_states
        self.keys, self.values = (held[..., :stop, :] for held in self._room)
        return self.keys, self.values

    def _grow(self, keys: Tensor, values: Tensor, length: int, capacity: int) -> None:
        room = tuple(new.new_empty(*new.shape[:2], capacity, new.shape[-1]) for new in (keys, values))
        if length:
            room[0][..., :length, :] = self.keys
            room[1][..., :length, :] = self.values
        self._room = (room[0], room[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` ``[m]``; an index may occur several times."""
        super().batch_select_indices(indices)
        self._room = None

    def move_rows(self, source: Tensor, target: Tensor, number: int) -> None:
        """Copy the rows `source` onto the rows `target`, and keep the first `number` rows; nothing else is copied."""
        length = self.get_seq_length()
        if self._room is None:
            self._grow(self.keys, self.values, length, max(length, min(self.limit, length + BLOCK)))
        assert self._room is not None
        for held in self._room:
            held[target, :, :length] = held[source, :, :length]
        self._room = (self._room[0][:number], self._room[1][:number])
        self.keys, self.values = (held[:, :, :length] for held in self._room)

    def drop_columns(self, number: int) -> None:
        """Forget the first `number` tokens of every row."""
        self.keys, self.values = self.keys[..., number:, :], self.values[..., number:, :]
        self._room = None


def growing_cache(config: Any, limit: int) -> DynamicCache | None:
    """An empty cache for a model's text configuration and rows of at most `limit` tokens.

    None if it has layers whose rows cannot leave.
    """
    cache = DynamicCache(config=config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep_rows(cache: DynamicCache, kept: Tensor) -> Tensor:
    """Let all rows but `kept` ``[m]``, ascending, leave; the order ``[m]`` in which these stand from now on.

    Rows that stand among the first `m` stay where they are, the others take the places that are free.
    """
    number = len(kept)
    order = torch.full((number,), -1, dtype=torch.long, device=kept.device)
    order[kept[kept < number]] = kept[kept < number]
    source, target = kept[kept >= number], (order < 0).nonzero().squeeze(1)
    order[target] = source
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.move_rows(source, target, number)
        else:
            layer.batch_select_indices(order)
    return order


def drop_columns(cache: DynamicCache, number: int) -> bool:
    """Forget the first `number` tokens, if every layer can (one with a sliding window counts its tokens)."""
    layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
    if len(layers) < len(cache.layers):
        return False
    for layer in layers:
        layer.drop_columns(number)
    return True

"""A key/value cache that grows in blocks, and whose rows can leave and fork.

Shapes: ``n`` rows, ``H`` key/value heads, ``L`` cached tokens, ``d`` head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 64


class Room:
    """Keys and values of one layer with room behind them, as a decoder block meets them.

    Args:
        keys: ``[n, H, L + room, d]``.
        values: Likewise.
        length: ``L``, the tokens that are there.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[n, H, t, d]`` behind the others; all keys and all values ``[n, H, L+t, d]``, as views."""
        stop = self.length + key_states.shape[-2]
        self.keys[..., self.length : stop, :] = key_states
        self.values[..., self.length : stop, :] = value_states
        return self.keys[..., :stop, :], self.values[..., :stop, :]


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """`DynamicLayer` with room behind its last token: a step writes one column instead of copying the whole cache.

    Args:
        limit: Most tokens of a row; no room is made beyond it.
        rows: Most rows; likewise.
    """

    def __init__(self, limit: int, rows: int) -> None:
        super().__init__()
        self.limit, self.rows = limit, rows
        self._space: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[n, H, t, d]``; all keys and all values ``[n, H, L+t, d]``, as views of the room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self._make_room(key_states, value_states, key_states.shape[-2])
        self.keys, self.values = room.update(key_states, value_states)
        return self.keys, self.values

    def _make_room(self, keys: Tensor, values: Tensor, number: int) -> Room:
        """For `number` further tokens like those given."""
        start = self.get_seq_length()
        stop = start + number
        if self._space is None or stop > self._space[0].shape[-2]:
            self._grow(keys, values, len(keys), max(stop, min(self.limit, stop + max(BLOCK, stop // 4))))
        assert self._space is not None
        return Room(self._space[0][: len(keys)], self._space[1][: len(keys)], start)

    def _grow(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> None:
        """Make space for so many rows and columns, and move what there is into it."""
        space = tuple(new.new_empty(rows, new.shape[1], columns, new.shape[-1]) for new in (keys, values))
        if length := self.get_seq_length():
            space[0][: len(self.keys), :, :length] = self.keys
            space[1][: len(self.keys), :, :length] = self.values
        self._space = (space[0], space[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` ``[m]``; an index may occur several times."""
        super().batch_select_indices(indices)
        self._space = None

    def move_rows(self, source: Tensor, target: Tensor, number: int) -> None:
        """Copy the rows `source` onto the rows `target`, and keep the first `number` rows; nothing else is copied.

        There may be more rows afterwards than before.
        """
        length = self.get_seq_length()
        if self._space is None or len(self._space[0]) < number:
            columns = max(length, min(self.limit, length + BLOCK))
            self._grow(self.keys, self.values, max(number, min(self.rows, 2 * len(self.keys))), columns)
        assert self._space is not None
        for space in self._space:
            space[target, :, :length] = space[source, :, :length]
        self.keys, self.values = (space[:number, :, :length] for space in self._space)

    def drop_columns(self, number: int) -> None:
        """Forget the first `number` tokens of every row."""
        self.keys, self.values = self.keys[..., number:, :], self.values[..., number:, :]
        self._space = None


def growing_cache(config: Any, limit: int, rows: int) -> DynamicCache | None:
    """An empty cache for a model's text configuration and at most so many rows of at most `limit` tokens.

    None if it has layers whose rows cannot leave.
    """
    cache = DynamicCache(config=config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return None
    cache.layers = [GrowingLayer(limit, rows) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def keep_rows(cache: DynamicCache, kept: Tensor) -> Tensor:
    """Let all rows but `kept` ``[m]`` leave, ascending; one that occurs several times forks.

    Rows that stand among the first `m` stay where they are, the others take the places that are free.

    Returns:
        The order ``[m]`` in which those of `kept` stand from now on.
    """
    number, places = len(kept), torch.arange(len(kept), device=kept.device)
    stays = (kept < number) & (kept != torch.nn.functional.pad(kept[:-1], (1, 0), value=-1))
    order = torch.full_like(places, -1)
    order[kept[stays]] = places[stays]
    moved, target = places[~stays], (order < 0).nonzero().squeeze(1)
    order[target] = moved
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.move_rows(kept[moved], target, number)
        else:
            layer.batch_select_indices(kept[order])
    return order


def drop_columns(cache: DynamicCache, number: int) -> bool:
    """Forget the first `number` tokens, if every layer can (one with a sliding window counts its tokens)."""
    layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
    if len(layers) < len(cache.layers):
        return False
    for layer in layers:
        layer.drop_columns(number)
    return True

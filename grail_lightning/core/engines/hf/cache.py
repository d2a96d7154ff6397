"""A key/value cache that grows in blocks, and whose rows can be removed and duplicated.

Shapes: ``n`` rows, ``H`` key/value heads, ``L`` cached tokens, ``d`` head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

_GROWTH_TOKENS = 64


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]  # Transformers has no types.
    """A `DynamicLayer` with free columns at the end: a step writes one column instead of copying the whole cache.

    The tensors never have more than `limit` columns and `rows` rows.
    """

    def __init__(self, limit: int, rows: int) -> None:
        super().__init__()
        self.limit, self.rows = limit, rows
        self._space: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append ``[n, H, t, d]``; returns all keys and values ``[n, H, L+t, d]``, as views of the larger tensors."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, start = len(key_states), self.get_seq_length()
        stop = start + key_states.shape[-2]
        space = self._space
        if space is None or stop > space[0].shape[-2]:
            columns = max(stop, min(self.limit, stop + max(_GROWTH_TOKENS, stop // 4)))
            space = self._grow(key_states, value_states, rows, columns)
        for table, new in zip(space, (key_states, value_states), strict=True):
            table[:rows, :, start:stop] = new
        self.keys, self.values = (table[:rows, :, :stop] for table in space)
        return self.keys, self.values

    def _grow(self, keys: Tensor, values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        of_keys, of_values = (new.new_empty(rows, new.shape[1], columns, new.shape[-1]) for new in (keys, values))
        if length := self.get_seq_length():
            of_keys[: len(self.keys), :, :length] = self.keys
            of_values[: len(self.keys), :, :length] = self.values
        self._space = of_keys, of_values
        return self._space

    def move_rows(self, source: Tensor, target: Tensor, number: int) -> None:
        """Copy the rows `source` onto the rows `target` and keep the first `number` rows, which may be more."""
        length = self.get_seq_length()
        space = self._space
        if space is None or len(space[0]) < number:
            columns = max(length, min(self.limit, length + _GROWTH_TOKENS))
            space = self._grow(self.keys, self.values, max(number, min(self.rows, 2 * len(self.keys))), columns)
        for table in space:
            table[target, :, :length] = table[source, :, :length]
        self.keys, self.values = (table[:number, :, :length] for table in space)

    def drop_columns(self, number: int) -> None:
        self.keys, self.values = self.keys[..., number:, :], self.values[..., number:, :]
        if self._space is not None:  # Their memory is free with that of the others: a copy would cost more.
            self._space = self._space[0][..., number:, :], self._space[1][..., number:, :]


class GrowingCache(DynamicCache):  # type: ignore[misc]  # Transformers has no types.
    """An empty cache, whose rows and first columns can be removed, for a text configuration that `can_drop_rows`."""

    layers: list[DynamicLayer]

    def __init__(self, config: PreTrainedConfig, limit: int, rows: int) -> None:
        super().__init__(config=config)
        self.layers = [_GrowingLayer(limit, rows) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def keep_rows(self, kept: Tensor) -> Tensor:
        """Keep the rows `kept` ``[m]``, ascending, and remove all others. A row that occurs twice is duplicated.

        Rows with an index below `m` keep it; the others take the free ones. Returns the new order of `kept`.
        """
        number, places = len(kept), torch.arange(len(kept), device=kept.device)
        stays = (kept < number) & (kept != torch.nn.functional.pad(kept[:-1], (1, 0), value=-1))
        order = torch.full_like(places, -1)
        order[kept[stays]] = places[stays]
        moved, target = places[~stays], (order < 0).nonzero().squeeze(1)
        order[target] = moved
        for layer in self.layers:
            if isinstance(layer, _GrowingLayer):
                layer.move_rows(kept[moved], target, number)
            else:
                layer.batch_select_indices(kept[order])
        return order

    def fill(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Begin an empty cache with the keys and values of rows, as of `tokens_of`; the columns before a row are 0."""
        keys_and_values = [*zip(*rows, strict=True)]
        for layer, *tables in zip(self.layers, keys_and_values[::2], keys_and_values[1::2], strict=True):
            padded = (pad_sequence(list(table), batch_first=True, padding_side="left") for table in tables)
            layer.update(*(table.transpose(1, 2) for table in padded))

    @property
    def takes_padding(self) -> bool:
        """Whether padding may stand between tokens, and columns can be removed: a sliding window counts them."""
        return all(isinstance(layer, _GrowingLayer) for layer in self.layers)

    def drop_columns(self, number: int) -> None:
        """Remove the first `number` tokens of every row, from a cache that `takes_padding`."""
        for layer in self.layers:
            layer.drop_columns(number)


class _FixedLayer(StaticLayer):  # type: ignore[misc]  # Transformers has no types.
    """A `StaticLayer` in the dtype in which attention computes: under autocast a model may give keys in float32."""

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        super().__init__(columns)
        self.attention_dtype = dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[n, H, t, d]`` into the next columns; returns the whole tables ``[n, H, C, d]``."""
        keys, values = (states.to(self.attention_dtype) for states in (key_states, value_states))
        updated: tuple[Tensor, Tensor] = super().update(keys, values)
        return updated


def moved_to_fixed(cache: Cache, rows: Tensor, columns: slice, number: int, dtype: torch.dtype) -> Cache:
    """A cache with a fixed `number` of columns, the first of which are `columns` of some `rows` of `cache`.

    The other one has no layers afterwards: the memory of each is free before the next is moved. One that
    `takes_padding` can be moved, and one that was.
    """
    layers = []
    while cache.layers:
        layer, fixed = cache.layers.pop(0), _FixedLayer(number, dtype)
        fixed.update(layer.keys[rows, :, columns], layer.values[rows, :, columns])
        layers.append(fixed)
    return Cache(layers=layers)


def can_drop_rows(config: PreTrainedConfig) -> bool:
    """Whether rows can be removed from every layer of the cache of a model with this text configuration."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers)


def tokens_of(cache: Cache, row: Tensor, column: Tensor) -> list[Tensor]:
    """The keys and values ``[k, H, d]`` of single tokens, of one layer after the other."""
    return [table[row, :, column] for layer in cache.layers for table in (layer.keys, layer.values)]

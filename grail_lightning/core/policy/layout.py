"""The layout of some rows' tokens in the decoder's input, and the way from its output back to the rows.

*Padded*: every row is a row of the decoder's input. *Packed*: the valid tokens of all rows form one long row, for
flash-attn's variable-length kernels. *Prefix trees*: tokens that several rows have in common at their beginning are run
once (`grail_lightning.core.policy.trees`). Only this module deals with the next-token shift.

Shapes: ``b`` rows, ``P`` prompt tokens, ``T`` response tokens, ``R × N`` places for tokens in the decoder's input,
``M`` predictions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from grail_lightning.core.functional.tokens import full_precision
from grail_lightning.core.rollout.batch import SampledBatch

ReadAt = Literal["predictor", "token"]


class Attention(Protocol):
    """What a layout's attention needs, as a named tuple of tensors and of what holds tensors."""

    def arguments(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """The decoder's arguments, whose blocks compute in `dtype`."""
        ...


class RowAttention(NamedTuple):
    """Attention of rows that share no tokens."""

    options: dict[str, Any]  # The decoder's arguments.

    def arguments(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """See `Attention`."""
        return self.options


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLayout:
    """The decoder's input for some rows, and the position at which each of their sampled tokens is predicted."""

    ids: Tensor  # [R, N] long, the tokens that are run
    positions: Tensor  # [R, N] long, the number of tokens that precede each token in its row
    predictors: Tensor  # [M] long, the index into R · N of the state that predicts each target
    targets: Tensor  # [M] long, the token ids that are predicted
    places: Tensor  # [M] long, the index of the target itself; −1 where it is not run because it predicts nothing
    prediction_of: Tensor  # [response_mask.sum()] long, the index of each response token's prediction among the M
    source_of: Tensor  # [M] long, the first response token (in the order of `response_mask`) that uses each prediction
    response_mask: Tensor  # [b, T] bool, the sampled tokens of the rows, which are meant by response tokens here
    cells: tuple[Tensor, ...]  # [response_mask.sum()] long each, the row and the column of each response token
    attention: Attention = field(repr=False)
    num_tokens: int  # Without padding.
    shares: bool  # Whether `prediction_of` is not the identity: rows use the same prediction, or in another order.

    def at_predictors(self, states: Tensor) -> Tensor:
        """``[R, N, D] -> [M, D]``: the states from which the targets are predicted."""
        table = states.flatten(0, 1)
        return gather_rows(table, self.predictors) if self.shares else table[self.predictors]

    def to_rows(self, values: Tensor) -> Tensor:
        """``[M] -> [b, T]``: the value of each response token's prediction, zero outside the response mask."""
        spread = gather_rows(values[:, None], self.prediction_of).squeeze(1) if self.shares else values
        return spread.new_zeros(self.response_mask.shape).index_put(self.cells, spread)

    def from_rows(self, values: Tensor) -> Tensor:
        """``[b, T] -> [M]``: the value of the first response token that uses each prediction."""
        return values[self.cells][self.source_of]

    def read(self, values: Tensor, read_at: ReadAt) -> Tensor:
        """``[R, N] -> [b, T]``: the value at each response token's own position, or at the one that predicts it."""
        flat = values.flatten()
        if read_at == "predictor":
            return self.to_rows(flat[self.predictors])
        return self.to_rows(torch.where(self.places >= 0, flat[self.places.clamp(min=0)], 0))

    def to(self, device: torch.device) -> Self:
        """The layout with its tensors on `device`; the host does not wait for it."""
        moved = {part.name: to_device(getattr(self, part.name), device) for part in fields(self)}
        return replace(self, **moved)


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor on `device`, or a tuple or dict with its tensors there; other values as they are.

    To CUDA they are copied from pinned memory: a copy from other memory waits until the device has done all that it was
    given before.
    """
    match value:
        case Tensor():
            if value.device == device or device.type != "cuda" or value.device.type != "cpu":
                return value.to(device)
            return value.pin_memory().to(device, non_blocking=True)
        case dict():
            return {name: to_device(part, device) for name, part in value.items()}
        case tuple():
            parts = [to_device(part, device) for part in value]
            return tuple(parts) if type(value) is tuple else type(value)(*parts)
        case _:
            return value


def padded_layout(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> TokenLayout:
    """A layout in which every row is a row of the decoder's input. The last column predicts nothing and is left out.

    The tensors are those of a `SampledBatch`. Tokens that the attention mask has alone are run, but not predicted.
    Layouts are best made on the CPU and moved: on CUDA the host waits for the number of tokens.
    """
    ids, mask = input_ids[:, :-1], attention_mask[:, :-1]
    places = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    tokens = ids, token_positions(mask), places, int(attention_mask.sum()) - len(ids)
    return _separate_rows(input_ids, response_mask, *tokens, attention_mask=mask.long())


def right_padded_layout(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> TokenLayout:
    """A layout like `padded_layout` in which every row begins at the first column.

    No position is without a key to attend to, so that attention maps are finite everywhere.
    """
    mask = attention_mask[:, :-1].bool()
    lengths = mask.sum(1)
    columns = torch.arange(int(lengths.max()), device=mask.device)
    moved = columns < lengths[:, None]
    ids = input_ids.new_zeros(moved.shape).masked_scatter(moved, input_ids[:, :-1][mask])
    places = torch.zeros_like(mask, dtype=torch.long)
    places[mask] = torch.arange(moved.numel(), device=mask.device).view_as(moved)[moved]
    tokens = ids, columns.expand_as(moved), places, int(attention_mask.sum()) - len(ids)
    return _separate_rows(input_ids, response_mask, *tokens, attention_mask=moved.long())


def packed_layout(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, *, flash: bool) -> TokenLayout:
    """A layout in which the valid tokens of all rows form one row.

    Transformers recognises the rows by positions that start again at 0. flash-attn receives the boundaries directly,
    because computing them would synchronise with the device in each layer.
    """
    mask = attention_mask[:, :-1].bool()
    lengths = mask.sum(1)
    number = int(lengths.sum())
    places = torch.zeros_like(mask, dtype=torch.long)
    places[mask] = torch.arange(number, device=mask.device)
    borders: dict[str, Any] = {}
    if flash:
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        borders = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    # The last token of a row predicts nothing, and counts as not run, as in the other layouts.
    counted = int(attention_mask.sum()) - len(input_ids)
    tokens = input_ids[:, :-1][mask][None], token_positions(mask)[mask][None], places, counted
    return _separate_rows(input_ids, response_mask, *tokens, attention_mask=None, **borders)


def _separate_rows(
    input_ids: Tensor,
    response_mask: Tensor,
    ids: Tensor,
    positions: Tensor,
    places: Tensor,
    num_tokens: int,
    **attention: Any,
) -> TokenLayout:
    """A layout of rows that share no tokens; ``places [b, P+T-1]`` are the indices of the rows' tokens among `ids`."""
    length = response_mask.shape[1]
    padded_places = torch.cat([places, torch.full_like(places[:, :1], -1)], 1)
    targets = input_ids[:, input_ids.shape[1] - length :][response_mask].long()
    every = torch.arange(len(targets), device=targets.device)  # Each response token has a prediction of its own.
    return TokenLayout(
        ids=ids,
        positions=positions,
        predictors=places[:, places.shape[1] - length :][response_mask],
        targets=targets,
        places=padded_places[:, padded_places.shape[1] - length :][response_mask],
        prediction_of=every,
        source_of=every,
        response_mask=response_mask,
        cells=response_mask.nonzero(as_tuple=True),
        attention=RowAttention(attention),
        num_tokens=num_tokens,
        shares=False,
    )


def token_positions(mask: Tensor) -> Tensor:
    """``[b, W]`` long: the number of valid tokens before each token in its row. Padding does not shift positions."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, whose gradients are summed in at least float32 and in a fixed order (on CUDA, too)."""
    return torch.nn.functional.embedding(index, full_precision(table)).to(table.dtype)


# --- rows that begin alike --------------------------------------------------------------------------------------------


class AlignedRows(NamedTuple):
    """Rows without padding on the left, so that a token's column is its position. On the CPU."""

    ids: Tensor  # [b, W] long; −1 is padding
    valid: Tensor  # [b, W] bool, the tokens
    prompt_lengths: Tensor  # [b] long, the tokens of each prompt

    def select(self, rows: Sequence[int]) -> AlignedRows:
        """The rows with these indices."""
        return AlignedRows(*(tensor[list(rows)] for tensor in self))


def aligned(input_ids: Tensor, attention_mask: Tensor, prompt_width: int) -> AlignedRows:
    """Rows of prompts that are padded left and responses that are padded right, ``[b, W]`` each, moved to the left."""
    ids, valid = input_ids.cpu(), attention_mask.cpu().bool()
    pads = (~valid[:, :prompt_width]).sum(1)
    columns = torch.arange(ids.shape[1]) + pads[:, None]
    inside = columns < ids.shape[1]
    columns = columns.clamp(max=ids.shape[1] - 1)
    valid = valid.gather(1, columns) & inside
    return AlignedRows(ids.gather(1, columns).masked_fill(~valid, -1), valid, prompt_width - pads)


def shared_columns(rows: AlignedRows, *, share_responses: bool = True) -> Tensor:
    """``[b]`` long: the number of tokens that each row has in common with the row before.

    Rows of different prompts share tokens of both prompts alone, without the last one, which predicts a response.
    """
    width, lengths = rows.ids.shape[1], rows.prompt_lengths
    same = (rows.ids[1:] == rows.ids[:-1]).int().cumprod(1).sum(1)
    shorter = torch.minimum(lengths[1:], lengths[:-1])
    alike = (lengths[1:] == lengths[:-1]) & (same >= (shorter if share_responses else width))
    return torch.nn.functional.pad(torch.where(alike, same, torch.minimum(same, shorter - 1)), (1, 0))


def order_by_beginning(rows: AlignedRows, group: Tensor) -> list[int]:
    """The order in which the rows of a group are neighbours, and those that begin alike are neighbours among them."""
    texts = [row.tobytes() for row in rows.ids.int().numpy()]
    return sorted(range(len(texts)), key=list(zip(group.tolist(), texts, strict=True)).__getitem__)


def first_rows(new: Tensor) -> Tensor:
    """``[b, W]`` long: the row in which each token occurs first. `new` is True behind what the row before has."""
    return torch.where(new, torch.arange(len(new))[:, None], 0).cummax(0).values


def group_nodes(batch: SampledBatch) -> Tensor:
    """The nodes of each group's prefix tree: tokens of two rows have one number if they and all before them are equal.

    The result ``[B, T]`` is on the CPU: numbers from 0 without a gap, −1 on padding. Rows of a group whose environments
    began with other texts have no node in common.
    """
    valid, group = batch.valid_mask.cpu(), batch.group.cpu()
    if batch.turn is not None:
        width = batch.prompt_width
        prompts = batch.input_ids[:, :width].masked_fill(~batch.attention_mask[:, :width], -1).cpu()
        _, group = torch.unique(torch.cat([group[:, None], prompts], 1), dim=0, return_inverse=True)
    # The rows of a group now have one prompt, so their responses can be compared alone.
    ids = batch.response_ids.cpu().masked_fill(~valid, -1)
    rows = AlignedRows(ids, valid, torch.zeros(len(valid), dtype=torch.long))
    order = order_by_beginning(rows, group)
    rows, group = rows.select(order), group[order]
    shared = shared_columns(rows)
    shared[1:][group[1:] != group[:-1]] = 0
    columns = torch.arange(valid.shape[1])
    cells = first_rows(columns >= shared[:, None]) * valid.shape[1] + columns
    nodes = torch.full(valid.shape, -1, dtype=torch.long)
    nodes[order] = cells
    nodes[valid] = torch.unique(nodes[valid], return_inverse=True)[1]
    return nodes.masked_fill(~valid, -1)

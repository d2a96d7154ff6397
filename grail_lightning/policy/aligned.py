"""Rows without padding on the left, and the tokens that they have in common at their beginning.

Shapes: ``b`` rows, ``W`` columns, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AlignedRows(NamedTuple):
    """Rows without padding on the left, so that a token's column is its position. On the CPU.

    Attributes:
        ids: ``[b, W]`` long; −1 is padding.
        valid: ``[b, W]`` bool, the tokens.
        prompt_lengths: ``[b]`` long, the tokens of each prompt.
    """

    ids: Tensor
    valid: Tensor
    prompt_lengths: Tensor

    def select(self, rows: Sequence[int]) -> AlignedRows:
        """The given rows, in the given order."""
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

    Args:
        rows: ``b`` rows.
        share_responses: See `grail_lightning.policy.trees.tree_layout`.
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
    """``[b, W]`` long: the row in which the token of each cell occurs for the first time.

    Args:
        new: ``[b, W]`` bool, True from where a row differs from the row before.
    """
    return torch.where(new, torch.arange(len(new))[:, None], 0).cummax(0).values


def response_nodes(response_ids: Tensor, response_mask: Tensor, group: Tensor) -> Tensor:
    """The nodes of each group's prefix tree: tokens of two rows have one number if they and all before them are equal.

    Args:
        response_ids: ``[b, T]``, padded on the right.
        response_mask: ``[b, T]`` bool.
        group: ``[b]`` long, the groups; rows of different groups have no node in common.

    Returns:
        ``[b, T]`` long on the CPU: numbers from 0 without a gap, −1 on padding.
    """
    valid, group = response_mask.cpu(), group.cpu()
    # The rows of a group have one prompt, so their responses can be compared alone.
    rows = AlignedRows(response_ids.cpu().masked_fill(~valid, -1), valid, torch.zeros(len(valid), dtype=torch.long))
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

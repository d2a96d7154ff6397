"""Rows without padding on the left, and the tokens that neighbouring rows have in common.

Shapes: ``b`` rows, ``W`` columns.
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

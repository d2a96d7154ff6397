"""Padding-free rows: the valid tokens of all rows behind each other as one row, and back.

Shapes: ``B`` rows, ``W`` columns, ``N`` valid tokens, ``D`` width.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grail_lightning.policy.model import Policy


def pack(padded: Tensor, mask: Tensor) -> Tensor:
    """``[B, W, ...] -> [1, N, ...]``: the entries under the mask ``[B, W]``, row behind row."""
    return padded[mask][None]


def unpack(packed: Tensor, mask: Tensor) -> Tensor:
    """``[1, N, ...] -> [B, W, ...]``: back to where `pack` took them from; zero elsewhere."""
    padded = packed.new_zeros(*mask.shape, *packed.shape[2:])
    return padded.index_put((mask,), packed[0])


def boundaries(mask: Tensor) -> dict[str, Any]:
    """Where the rows of a mask ``[B, W]`` begin once they are packed, as flash-attn's variable-length kernels take it.

    Without them Transformers looks for positions that begin again, in each layer, and waits for the device each time.
    """
    lengths = mask.sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def check_packing(policy: Policy) -> None:
    """Compare packed rows with the same rows one by one.

    Raises:
        ValueError: If they differ: something in the architecture reaches from a row into the next one.
    """
    with policy.trial(3, 5) as (ids, mask), policy.eager_attention() if policy.flash else nullcontext():
        mask[0, :2] = mask[1, 4:] = False
        packed = policy.hidden(mask, input_ids=ids).float()
        for row, kept, found in zip(ids, mask, packed, strict=True):
            alone = policy.decoder(input_ids=row[kept][None], use_cache=False).last_hidden_state[0].float()
            error = (found[kept] - alone).norm() / alone.norm()
            if not error < torch.finfo(policy.model.dtype).eps ** 0.5:
                raise ValueError(
                    f"`loading.packing` needs rows that do not see each other, but in {type(policy.model).__name__} "
                    f"they do (relative difference {error:.3g}). Leave packing off for this architecture."
                )

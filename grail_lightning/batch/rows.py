"""Rows of batches: padding and shortening them, joining batches, and cutting rows into micro-batches.

Shapes: ``B`` rows, ``W`` columns, ``T`` response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from grail_lightning.batch.records import WHOLE_ROWS, AnswerMasks, SampledBatch
from grail_lightning.environments.episode import one_turn

Batch = TypeVar("Batch", bound=SampledBatch)


def join(first: Batch, second: Batch) -> Batch:
    """The rows of both batches, padded to common widths.

    If one batch alone has rollouts of several turns, the responses of the other are rollouts of one turn.
    """
    if (first.turn is None) != (second.turn is None):
        first, second = _with_turns(first), _with_turns(second)
    prompt = max(first.prompt_width, second.prompt_width)
    response = max(first.response_ids.shape[1], second.response_ids.shape[1])

    def widen(name: str, value: Tensor, batch: Batch) -> Tensor:
        if value.ndim < 2:
            return value
        left = prompt - batch.prompt_width if name in WHOLE_ROWS else 0
        return F.pad(value, (left, response - batch.response_ids.shape[1]))

    def both(name: str, one: Any, other: Any) -> Any:
        match one:
            case Tensor():
                return torch.cat([widen(name, one, first), widen(name, other, second)])
            case list():
                return one + other
            case AnswerMasks():
                names = [f.name for f in dataclasses.fields(one)]
                return AnswerMasks(**{n: both(n, getattr(one, n), getattr(other, n)) for n in names})
            case dict():
                # Tasks may differ in the parts of their rewards; NaN means not applicable.
                rows = {key: (_or_nan(one, key, first), _or_nan(other, key, second)) for key in one | other}
                return {key: torch.cat(parts) for key, parts in rows.items()}
            case _:
                return one

    others = second.fields()
    return first.replace(**{name: both(name, value, others[name]) for name, value in first.fields().items()})


def _with_turns(batch: Batch) -> Batch:
    """The batch with `turn` and `episodes`: a response without an environment is one turn."""
    if batch.turn is not None:
        return batch
    episodes = list(map(one_turn, batch.texts, batch.finished.tolist()))
    return batch.replace(turn=torch.zeros_like(batch.response_ids, dtype=torch.long), episodes=episodes)


def _or_nan(values: dict[str, Tensor], key: str, batch: SampledBatch) -> Tensor:
    missing = torch.full((len(batch),), torch.nan, device=batch.input_ids.device)
    return values.get(key, missing)


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Lists of token ids as ``ids [B, W]`` and ``mask [B, W]``, padded on the left."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], dtype=torch.long)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], dtype=torch.bool)
    return ids.reshape(len(rows), width), mask.reshape(len(rows), width)


def lengths_to_mask(lengths: Tensor, width: int) -> Tensor:
    """``[B]`` lengths as a ``[B, width]`` bool mask that is True on the first columns."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def micro_batches(costs: Tensor, token_budget: int, rows: Tensor | None = None) -> list[Tensor]:
    """Cut rows into micro-batches whose padded size is within a token budget; the rows of each are ascending.

    Rows are sorted by length, longest first, so that a lack of memory shows in the first micro-batch. Rows are added to
    a micro-batch as long as ``number of rows × longest row ≤ token_budget``. A row longer than the budget has a
    micro-batch of its own.

    `costs` are the tokens of each row, ``[B]``; or ``[B, C]`` for parts that are padded separately, such as prompt and
    response: the longest row is then the sum of the longest parts. Without ``rows [n]`` all rows are cut.
    """
    if rows is None:
        rows = torch.arange(len(costs))
    parts, rows = costs.cpu().reshape(len(costs), -1), rows.cpu()
    order = rows[torch.argsort(parts.sum(1)[rows], descending=True, stable=True)]
    cuts: list[list[int]] = []
    longest = parts.new_zeros(parts.shape[1])
    for row in order.tolist():
        grown = torch.maximum(longest, parts[row])
        if not cuts or (len(cuts[-1]) + 1) * int(grown.sum()) > token_budget:
            cuts.append([])
            grown = parts[row]
        cuts[-1].append(row)
        longest = grown
    return [torch.tensor(sorted(cut), dtype=torch.long) for cut in cuts]


def last_marked(mask: Tensor) -> Tensor:
    """``[B]`` long: the last True column of each row of ``[B, T]``, counted from 1; 0 for a row without one."""
    return (torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask).amax(1)


def cut_responses(batch: Batch, ends: Tensor) -> Batch:
    """The batch with each response ending before column `ends` ``[B]``; the number of columns is unchanged."""
    kept = lengths_to_mask(ends, batch.response_mask.shape[1])
    attention = torch.cat([batch.attention_mask[:, : batch.prompt_width], batch.valid_mask & kept], 1)
    return batch.replace(response_mask=batch.response_mask & kept, attention_mask=attention)

"""The rows of a batch, cut into micro-batches that the policy runs one after the other.

Shapes: ``B`` rows, ``T`` response tokens, ``n`` rows of a micro-batch, ``W`` columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grail_lightning.core.policy.capabilities import within_attention_window
from grail_lightning.core.policy.layout import AlignedRows, aligned, order_by_beginning, shared_columns, to_device
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import SampledBatch, micro_batches

MIN_COMMON_TOKENS = 16
"""The length from which what all rows begin with (a system prompt, worked examples) is run once for all groups."""


_LEAST_SHARED = 0.05
"""On CUDA, the share of tokens that common beginnings must save for rows to be run as trees. On one H200 a step on
responses with 2 % in common took 1.06 of that of whole rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """The rows of one forward pass.

    Example: rows 0 to 3 have the prompt ``7 8`` and the responses ``3 4 5 9``, ``3 4 6 9``, ``3 4 6 9`` and ``4 9``.

    - Run separately, with 18 tokens at a time: ``MicroBatch(rows=[0, 1, 2])``, 3 rows of 6 tokens, and then
      ``MicroBatch(rows=[3])``.
    - Run as a prefix tree: ``MicroBatch(rows=[0, 1, 2, 3], starts=[0])``, of which 7 tokens are run: ``7 8 3 4 5`` of
      row 0, ``6`` of rows 1 and 2, and ``4`` of row 3. The last token of a row predicts nothing and is left out.
    """

    rows: Tensor  # [n] long on the CPU, in the order in which they are laid out
    starts: list[int] | None = None  # The indices into `rows` at which a tree begins; None if rows are run separately.
    is_dummy: bool = False  # Whether it replaces missing work, on a rank with fewer micro-batches than others.


def cut_rows(
    policy: Policy,
    batch: SampledBatch,
    rows: Tensor,
    token_budget: int,
    *,
    share: bool = True,
    share_responses: bool = True,
) -> list[MicroBatch]:
    """Micro-batches of ``rows [n]`` within a token budget, in which padding counts; the longest rows come first.

    The policy must already be in the mode (training or evaluation) in which it will run them. With `share` common
    beginnings of rows are run once, if it supports that; see `grail_lightning.core.policy.trees.tree_layout`. On CUDA,
    if that would save too few tokens, rows are not joined: with flash attention each row is a tree of its own, without
    padding and copies, with SDPA rows are padded.
    """
    rows, on_cuda = rows.cpu(), policy.device.type == "cuda"
    if share and len(rows) and policy.shares_prefixes and within_attention_window(policy, batch.input_ids.shape[1]):
        ids, valid, group = (t.cpu()[rows] for t in (batch.input_ids, batch.attention_mask, batch.group))
        trees = cut_into_trees(
            ids,
            valid,
            group,
            token_budget,
            prompt_width=batch.prompt_width,
            share_responses=share_responses,
            least_shared=_LEAST_SHARED if on_cuda else 0.0,
        )
        shares = any(len(tree.starts or ()) < len(tree.rows) for tree in trees)
        if shares or not on_cuda or policy.tree_kernel == "varlen":
            return [replace(tree, rows=rows[tree.rows]) for tree in trees]
    return [MicroBatch(rows=part) for part in micro_batches(batch.lengths, token_budget, rows)]


def cut_into_trees(
    ids: Tensor,
    valid: Tensor,
    group: Tensor,
    token_budget: int,
    *,
    prompt_width: int,
    share_responses: bool = True,
    least_shared: float = 0.0,
) -> list[MicroBatch]:
    """Micro-batches of prefix trees within a token budget, the largest trees first.

    Rows of a group are in one tree as long as it fits into the budget, and so are all groups if they have a long common
    beginning, such as worked examples. Groups with the same prompt are in different trees even then, because their
    references may differ: rows of two groups never share a prediction. The size of a row is the number of tokens that
    it adds and, where it needs an attention unit of its own, a quarter of those that it shares, which are copied then.
    If all rows together share less than `least_shared` of their tokens, each is a tree of its own.
    """
    if not len(ids):
        return []
    rows = aligned(ids, valid, prompt_width)
    common = int((rows.ids == rows.ids[0]).all(0).int().cumprod(0).sum())
    if common >= MIN_COMMON_TOKENS:
        group = _occurrence_of_prompt(rows, group)
    order = order_by_beginning(rows, group)
    rows, group = rows.select(order), group[order]
    shared = shared_columns(rows, share_responses=share_responses)
    shared[1:][group[1:] != group[:-1]] = 0
    lengths = rows.valid.sum(1) - 1  # The last token of a row is not run.
    shared = torch.minimum(shared, torch.minimum(lengths, lengths.roll(1)))
    if shared.sum() < least_shared * lengths.sum():
        shared = torch.zeros_like(shared)
    batches: list[list[list[int]]] = []
    room = 0
    for tree, size in sorted(_join_into_trees(lengths, shared, token_budget), key=lambda t: t[1], reverse=True):
        if not batches or size > room:
            batches.append([])
            room = token_budget
        batches[-1].append([order[row] for row in tree])
        room -= size
    return [
        MicroBatch(
            rows=torch.tensor(list(itertools.chain(*members)), dtype=torch.long),
            starts=list(itertools.accumulate(map(len, members[:-1]), initial=0)),
        )
        for members in batches
    ]


def _occurrence_of_prompt(rows: AlignedRows, group: Tensor) -> Tensor:
    """``[n]`` long: of the groups with a row's prompt, the number that come before its own group."""
    columns = torch.arange(rows.ids.shape[1])
    prompts = rows.ids.masked_fill(columns >= rows.prompt_lengths[:, None], -1).numpy()
    seen: dict[bytes, dict[int, int]] = {}
    occurrences = []
    for prompt, group_number in zip(prompts, group.tolist(), strict=True):
        groups = seen.setdefault(prompt.tobytes(), {})
        occurrences.append(groups.setdefault(group_number, len(groups)))
    return torch.tensor(occurrences)


def _join_into_trees(lengths: Tensor, shared: Tensor, token_budget: int) -> list[tuple[range, int]]:
    """Neighbouring rows as trees within a token budget: the rows and the size of each.

    ``shared [n]`` are the tokens that a row has in common with the row before, 0 where it must begin a tree.
    """
    trees: list[tuple[range, int]] = []
    longest = queries = 0  # Of the last tree: the most tokens that a row adds, and the tokens of its last unit.
    for row, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        added = length - common
        begins_unit = queries + added > longest
        joined = added + (common // 4 if begins_unit else 0)
        if trees and common and trees[-1][1] + joined <= token_budget:
            rows, size = trees[-1]
            trees[-1] = range(rows.start, row + 1), size + joined
            longest, queries = max(longest, added), added if begins_unit else queries + added
        else:
            trees.append((range(row, row + 1), length))
            longest = queries = length
    return trees


def dummy_micro_batch(batch: SampledBatch) -> MicroBatch:
    """A micro-batch for a rank without work, so that it joins the collectives: its first row with a response."""
    return MicroBatch(rows=batch.response_mask.any(1).long().argmax().reshape(1).cpu(), is_dummy=True)


def zero_table(policy: Policy, batch: SampledBatch) -> Tensor:
    """``[B, T]`` zeros for figures of the policy, float32 at least."""
    dtype = torch.promote_types(policy.model.dtype, torch.float32)
    return torch.zeros(batch.response_mask.shape, dtype=dtype, device=batch.response_mask.device)


def scatter(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write ``values [n, t]`` of some rows into ``table [B, T]``, in the table's dtype."""
    table[to_device(rows, table.device), : values.shape[1]] = values.detach().to(table.dtype)

"""Prefix trees: tokens that several rows have in common at their beginning are run once, forward and backward.

The rows of a group share their prompt and often the beginning of their responses. The distinct tokens of such rows form
a tree, which is laid out as one sequence in preorder, so that the decoder's linear layers process every distinct token
once. Attention is computed in *units*. A unit has some tokens as queries, and the tokens on their paths as keys. The
cost of attention therefore depends on the lengths of the paths, not on the size of the tree.

Shapes: ``b`` rows, ``P`` prompt tokens, ``T`` response tokens, ``W = P + T`` columns, ``N`` distinct tokens,
``U`` units of at most ``Q`` queries and ``K`` keys, ``M`` predictions, ``D`` width.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grail_lightning.policy.layout import TokenLayout, gather_rows

TREE_ATTENTION = "prefix_tree_sdpa"
"""The attention implementation with which a policy is loaded in place of Transformers' `sdpa`."""


class AttentionUnits(NamedTuple):
    """Queries, keys and masks of the attention in prefix trees.

    Attributes:
        queries: ``[U, Q]`` long, token numbers; padding has any number.
        keys: ``[U, K]`` long, token numbers; padding has any number.
        mask: ``[U, 1, Q, K]``, added to the attention scores: 0 where a query attends to a key.
        output_of: ``[N]`` long, the index into ``U · Q`` at which each token is a query.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    output_of: Tensor


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    units: AttentionUnits | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' SDPA or, if `units` are given, attention in prefix trees.

    Args:
        module: The attention module.
        query: ``[1, heads, N, d]``; without `units` any shape that Transformers accepts.
        key: ``[1, key heads, N, d]``.
        value: ``[1, key heads, N, d]``.
        attention_mask: Transformers' mask. It is ignored if `units` are given, which contain their own.
        units: The queries, keys and masks.
        options: The module's further arguments, with the scale of the scores.

    Returns:
        ``[1, N, heads, d]``, and None for the attention weights.
    """
    if units is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    asked = query[0].transpose(0, 1)[units.queries].transpose(1, 2)
    keys, values = _gather(key, units.keys), _gather(value, units.keys)
    # Under autocast SDPA converts its arguments to the mask's dtype itself. Each layer would keep one more copy.
    mask = units.mask if torch.is_autocast_enabled(query.device.type) else units.mask.to(query.dtype)
    scaling = options.get("scaling")
    out, _ = sdpa_attention_forward(module, asked, keys, values, mask, scaling=scaling)
    return out.flatten(0, 1)[units.output_of][None], None


def _gather(states: Tensor, index: Tensor) -> Tensor:
    """``[1, heads, N, d] -> [U, heads, K, d]``: a copy of the states for each unit."""
    heads, number, size = states.shape[1:]
    table = states[0].transpose(0, 1).reshape(number, heads * size)
    return gather_rows(table, index).view(*index.shape, heads, size).transpose(1, 2)


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)


def tree_layout(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    starts: Sequence[int],
    *,
    share_responses: bool = True,
) -> TokenLayout:
    """The layout of rows as prefix trees.

    A token is new where its row differs from the row before. Listed row by row, the new tokens of a tree are in
    preorder. The descendants of token ``j`` are ``j … end_j − 1``, and ``i`` attends to ``j`` where ``j ≤ i < end_j``.
    The last token of a row predicts nothing and is left out.

    Args:
        input_ids: ``[b, P+T]``, prompts padded left, responses padded right; rows with a common
            beginning are neighbours.
        attention_mask: ``[b, P+T]`` bool.
        response_mask: ``[b, T]`` bool.
        starts: The rows at which a tree begins, ascending; the first is 0.
        share_responses: Whether common beginnings of responses are run once, too. If False, rows share their prompt
            without its last token, and equal rows are run once. Every position that predicts a response token then
            belongs to one response.
    """
    device, width = input_ids.device, input_ids.shape[1] - response_mask.shape[1]
    ids, valid, responses = input_ids.cpu(), attention_mask.cpu(), response_mask.cpu()
    rows, columns = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1])
    shared = shared_columns(ids, valid, None if share_responses else width - 1)
    shared[list(starts)] = 0
    new = columns >= shared[:, None]
    owner = torch.where(new, rows, 0).cummax(0).values
    cells = owner * ids.shape[1] + columns  # Where in a `[b, W]` table a token occurs for the first time.

    followed = valid & torch.nn.functional.pad(valid[:, 1:], (0, 1))
    run = torch.zeros_like(valid)
    run.view(-1)[cells[followed]] = True
    number = torch.where(run.flatten(), run.flatten().cumsum(0) - 1, -1)
    begin = torch.nn.functional.pad(run.sum(1).cumsum(0), (1, 0))  # `[b + 1]`: the tokens of the rows before.
    # The first later row that does not pass through a token has at most the columns before it in common.
    leaves = torch.where(new, rows, len(ids)).roll(-1, 0)
    leaves[-1] = len(ids)
    end = begin[leaves.flip(0).cummin(0).values.flip(0)][run]

    scored = new[:, width:] & responses
    index = (scored.flatten().cumsum(0) - 1).view_as(scored)
    predictors = number[cells][:, width - 1 : -1]
    every = torch.full(responses.shape, -1, dtype=torch.long)
    every[responses] = torch.arange(int(responses.sum()))
    units = _units(number[cells], run.sum(1), begin, end, followed & ~new, starts)
    tensors = {
        "ids": ids[run][None].long(),
        "positions": (valid.cumsum(1) - 1)[run][None],
        "predictors": predictors[scored],
        "targets": ids[:, width:][scored].long(),
        "places": number.view_as(ids)[:, width:][scored],
        "prediction_of": index[owner[:, width:], columns[: scored.shape[1]]][responses],
        "source_of": every[scored],
    }
    return TokenLayout(
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        response_mask=response_mask,
        attention=lambda dtype: _attention(units, dtype, device),
        num_tokens=int(run.sum()),
    )


def shared_columns(ids: Tensor, valid: Tensor, most: int | None = None) -> Tensor:
    """``[b]`` long: the number of columns that each row has in common with the row before, left padding included.

    Args:
        ids: ``[b, W]``.
        valid: ``[b, W]`` bool.
        most: The most columns that rows which differ may share; None sets no limit.
    """
    same = (ids[1:] == ids[:-1]) & (valid[1:] == valid[:-1]) | ~valid[1:] & ~valid[:-1]
    shared = torch.nn.functional.pad(same.int().cumprod(1).sum(1), (1, 0))
    return shared if most is None else torch.where(shared < ids.shape[1], shared.clamp(max=most), shared)


def _units(
    path: Tensor, own: Tensor, begin: Tensor, end: Tensor, inherited: Tensor, starts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Units of neighbouring rows: queries ``[U, Q]``, keys ``[U, K]``, mask ``[U, Q, K]``, indices of outputs ``[N]``.

    A unit's queries are the tokens that its rows add to the tree; its keys are these and the path to the first of them.
    Rows that add few tokens are joined in one unit of at most as many queries as the longest row has, which costs no
    further padding.
    """
    most, trees = int(own.max()), set(starts)
    heads: list[int] = []
    sizes: list[int] = []
    for row, added in enumerate(own.tolist()):
        if not heads or row in trees or sizes[-1] + added > most:
            heads.append(row)
            sizes.append(0)
        sizes[-1] += added
    kept = [k for k, size in enumerate(sizes) if size]
    first, counts = [heads[k] for k in kept], torch.tensor([sizes[k] for k in kept])
    spans = [torch.arange(int(begin[row]), int(begin[row]) + size) for row, size in zip(first, counts, strict=True)]
    queries = pad_sequence(spans, batch_first=True)
    paths = [torch.cat([path[row][inherited[row]], span]) for row, span in zip(first, spans, strict=True)]
    keys = pad_sequence(paths, batch_first=True)
    asked = torch.arange(queries.shape[1]) < counts[:, None]
    given = torch.arange(keys.shape[1]) < torch.tensor([len(p) for p in paths])[:, None]
    query_number, key_number = queries[:, :, None], keys[:, None]
    mask = (key_number <= query_number) & (query_number < end[keys][:, None]) & given[:, None]
    mask[..., 0] |= ~asked  # A query that is padding has to attend to something.
    output_of = torch.zeros(len(end), dtype=torch.long)
    output_of[queries[asked]] = asked.flatten().nonzero().squeeze(1)
    return queries, keys, mask, output_of


def _attention(units: tuple[Tensor, ...], dtype: torch.dtype, device: torch.device) -> Mapping[str, Any]:
    """The decoder's arguments. SDPA would convert a boolean mask in each layer and keep the result."""
    queries, keys, mask, output_of = (tensor.to(device) for tensor in units)
    number = keys.shape[1]
    # CUDA's kernels would copy a mask whose rows do not begin at multiples of 16.
    shape = (len(queries), 1, queries.shape[1], number + -number % 16)
    added = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device)[..., :number]
    # Transformers makes no mask of its own if it is given one of four dimensions.
    return {
        "attention_mask": added.new_zeros(1, 1, 1, 1),
        "units": AttentionUnits(queries, keys, added.masked_fill_(mask[:, None], 0), output_of),
    }


class TreeBatch(NamedTuple):
    """The rows of one micro-batch of prefix trees.

    Attributes:
        rows: ``[n]`` long, in the order of `tree_layout`.
        starts: The indices into `rows` at which a tree begins.
    """

    rows: Tensor
    starts: list[int]


def cut_into_trees(
    ids: Tensor, valid: Tensor, group: Tensor, token_budget: int, *, prompt_width: int, share_responses: bool = True
) -> list[TreeBatch]:
    """Micro-batches of prefix trees within a token budget, the largest trees first.

    Rows of a group are in one tree as long as it fits into the budget. The size of a row is the number of tokens that
    it adds, and a quarter of those that it shares, whose keys and values are copied.

    Args:
        ids: ``[n, W]``, token ids.
        valid: ``[n, W]`` bool, the tokens that are not padding.
        group: ``[n]`` long; rows of different groups are never in one tree.
        token_budget: Most tokens of a micro-batch; a longer row has a micro-batch of its own.
        prompt_width: P, the columns before the first response column.
        share_responses: See `tree_layout`.
    """
    if not len(ids):
        return []
    texts = [row.tobytes() for row in ids.int().numpy()]
    order = sorted(range(len(ids)), key=list(zip(group.tolist(), texts, strict=True)).__getitem__)
    ids, valid, group = ids[order], valid[order], group[order]
    shared = shared_columns(ids, valid, None if share_responses else prompt_width - 1)
    shared = (shared - (~valid[:, :prompt_width]).sum(1)).clamp(min=0)
    lengths = valid.sum(1) - 1
    shared = torch.minimum(shared, lengths.roll(1))  # The row before does not run its last token.
    trees: list[list[int]] = []
    sizes: list[int] = []
    for row, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        joined = max(0, length - common) + min(length, common) // 4
        if trees and group[row] == group[row - 1] and sizes[-1] + joined <= token_budget:
            trees[-1].append(order[row])
            sizes[-1] += joined
        else:
            trees.append([order[row]])
            sizes.append(length)
    batches: list[list[list[int]]] = []
    room = 0
    for k in sorted(range(len(trees)), key=sizes.__getitem__, reverse=True):
        if not batches or sizes[k] > room:
            batches.append([])
            room = token_budget
        batches[-1].append(trees[k])
        room -= sizes[k]
    return [
        TreeBatch(
            torch.tensor(list(itertools.chain(*members)), dtype=torch.long),
            list(itertools.accumulate(map(len, members[:-1]), initial=0)),
        )
        for members in batches
    ]

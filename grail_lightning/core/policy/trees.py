"""Prefix trees: tokens that several rows have in common at their beginning are run once, forward and backward.

The rows of a group share their prompt and often the beginning of their responses. The distinct tokens of such rows form
a tree, which is laid out as one sequence in preorder, so that the decoder's linear layers process every distinct token
once. Attention is computed in *units*. A unit has some tokens as queries, and the tokens on their paths as keys. The
cost of attention therefore depends on the lengths of the paths, not on the size of the tree.

CUDA has two kernels: flash attention for sequences of different lengths (`varlen_attn`, half precision), where a unit
is a row, and SDPA, as on a CPU.

Shapes: ``b`` rows, ``P`` prompt tokens, ``T`` response tokens, ``W = P + T`` columns, ``N`` distinct tokens,
``U`` units of at most ``Q`` queries and ``K`` keys, ``M`` predictions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grail_lightning.core.functional.tokens import full_precision
from grail_lightning.core.policy.layout import (
    Attention,
    TokenLayout,
    aligned,
    first_rows,
    gather_rows,
    shared_columns,
)

TreeKernel = Literal["sdpa", "varlen"]

_MOST_KEYS = 3
"""`varlen_attn` has copies of the path's keys for each row. Where they exceed this multiple of the distinct tokens, as
behind long prompts with short answers, SDPA computes, whose units join rows."""

TREE_ATTENTION = "sdpa"
"""The name under which this attention replaces Transformers' own SDPA, which it calls where there is no prefix tree.
Models such as DeepSeek-V3.2 and GLM-5 select keys under this name and `eager` alone, and attend to all under others."""


class _AttentionUnits(NamedTuple):
    """Units of neighbouring rows: queries are the tokens that they add, keys these and the path to the first."""

    queries: Tensor  # [U, Q] long, token numbers
    keys: Tensor  # [U, K] long, token numbers
    mask: Tensor  # [U, Q, K] bool, where a query attends to a key; for SDPA [U, 1, Q, K], added to the scores
    output_of: Tensor  # [N] long, the index into U · Q at which each token is a query

    def arguments(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """See `Attention`."""
        mask, number = self.mask, self.keys.shape[1]
        # SDPA would convert a boolean mask in each layer and keep the result. CUDA's kernels would copy a mask whose
        # rows do not begin at multiples of 16.
        shape = (len(mask), 1, mask.shape[1], number + -number % 16)
        added = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device)[..., :number]
        units_there = self._replace(mask=added.masked_fill_(mask[:, None], 0))
        # Transformers makes no mask of its own if it is given one of four dimensions.
        return {"attention_mask": added.new_zeros(1, 1, 1, 1), "units": units_there}


class _Paths(NamedTuple):
    """Rows for `varlen_attn`, path by path: queries are the tokens that a row adds, keys these and the path to them."""

    keys: Tensor  # [sum of the paths] long, token numbers
    own: Tensor  # [N] long, the places of `keys` at which a token is a key of the row that adds it
    inherited: Tensor  # long, the other places
    inherited_keys: Tensor  # long, the token numbers there
    begins: tuple[Tensor, Tensor]  # [U + 1] int32 each, the first query and the first key of each row, and the numbers
    longest: tuple[int, int]  # The largest numbers of queries and of keys of a row.

    def arguments(self, dtype: torch.dtype) -> Mapping[str, Any]:
        """See `Attention`."""
        return {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=dtype, device=self.keys.device), "paths": self}


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    units: _AttentionUnits | None = None,
    paths: _Paths | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Transformers' SDPA or, if `units` or `paths` are given, attention ``[1, N, heads, d]`` in prefix trees."""
    scale = cast("float | None", options.get("scaling"))
    if (paths or units) and attention_mask is not None and attention_mask.numel() > 1:
        raise ValueError("Prefix trees have no place for the mask that this model adds to its attention.")
    if paths is not None:
        # Under autocast rotary embeddings may leave queries and keys in float32 beside values in half precision.
        queries, *states = (s[0].transpose(0, 1).to(value.dtype) for s in (query, key, value))
        if len(paths.inherited):  # Else the tokens are the keys.
            states = _AlongPaths.apply(*states, paths)  # type: ignore[no-untyped-call]
        arguments: tuple[Any, ...] = (queries, *states, *paths.begins, *paths.longest)
        grouped, causal = query.shape[1] != key.shape[1], (-1, 0)
        output = varlen_attn(*arguments, scale=scale, window_size=causal, enable_gqa=grouped)
        return cast(Tensor, output)[None], None
    if units is None:
        if torch.compiler.is_compiling() and query.shape[2] == 1 and attention_mask is not None:
            return _one_query(query, key, value, attention_mask, scale), None
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return whole
    queries = query[0].transpose(0, 1)[units.queries].transpose(1, 2)
    keys, values = _gather(key, units.keys), _gather(value, units.keys)
    # Under autocast SDPA converts its arguments to the mask's dtype itself. Each layer would keep one more copy.
    mask = units.mask if torch.is_autocast_enabled(query.device.type) else units.mask.to(query.dtype)
    out, _ = sdpa_attention_forward(module, queries, keys, values, mask, scaling=scale)
    return out.flatten(0, 1)[units.output_of][None], None


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention ``[b, 1, heads, d]`` of one token a row; heads that share keys are computed as queries of one head.

    Transformers does the same, except in compiled code, where it copies the keys for every head.
    """
    rows, heads, _, size = query.shape
    packed = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    mask = mask if mask.shape[1] == 1 else mask.reshape(*packed.shape[:3], -1)
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.reshape(rows, 1, heads, value.shape[-1])


def _gather(states: Tensor, index: Tensor) -> Tensor:
    """``[1, heads, N, d] -> [U, heads, K, d]``: a copy of the states for each unit."""
    heads, number, size = states.shape[1:]
    table = states[0].transpose(0, 1).reshape(number, heads * size)
    return gather_rows(table, index).view(*index.shape, heads, size).transpose(1, 2)


AttentionInterface.register(TREE_ATTENTION, _tree_attention)


def tree_layout(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    starts: Sequence[int],
    *,
    share_responses: bool = True,
    kernel: TreeKernel = "sdpa",
) -> TokenLayout:
    """The layout of rows as prefix trees.

    A token is new where its row differs from the row before. Listed row by row, the new tokens of a tree are in
    preorder. The descendants of token ``j`` are ``j … end_j − 1``, and ``i`` attends to ``j`` where ``j ≤ i < end_j``.
    The last token of a row predicts nothing and is left out. A token is predicted if any of its rows sampled it; in
    another row an environment may have put it in.

    Rows with a common beginning must be neighbours, and `starts` are those at which a tree begins. Without
    `share_responses` rows share their prompt without its last token, and equal rows are run once: every position that
    predicts a response token then belongs to one response.
    """
    prompt_width = input_ids.shape[1] - response_mask.shape[1]
    rows = aligned(input_ids, attention_mask, prompt_width)
    columns = torch.arange(rows.ids.shape[1])
    sampled = rows.valid & (columns >= rows.prompt_lengths[:, None])
    sampled[sampled.clone()] = response_mask.cpu()[attention_mask[:, prompt_width:].cpu().bool()]
    shared = shared_columns(rows, share_responses=share_responses)
    if not share_responses:  # Rows with equal tokens, of which they sampled different ones, share their prompt alone.
        alike = (sampled[1:] == sampled[:-1]).all(1)
        shared[1:] = torch.where(alike, shared[1:], torch.minimum(shared[1:], rows.prompt_lengths[1:] - 1))
    shared[list(starts)] = 0
    new = columns >= shared[:, None]
    tree = _number_tokens(rows.valid, new)
    cells = (tree.owner * len(columns) + columns)[sampled]
    scored = torch.zeros_like(sampled)
    scored.view(-1)[cells] = True
    prediction_of = (scored.flatten().cumsum(0) - 1)[cells]
    every, number = torch.arange(len(cells)), int(scored.sum())
    ids, positions = rows.ids[tree.run].long(), columns.expand_as(tree.run)[tree.run]
    if kernel == "varlen" and int(_keys_of_rows(tree).sum()) > _MOST_KEYS * len(ids):
        kernel = "sdpa"
    attention: Attention = _by_rows(tree) if kernel == "varlen" else _units(tree, starts)
    tensors = {
        "ids": ids[None],
        "positions": positions[None],
        "predictors": tree.number.roll(1, 1)[scored],
        "targets": rows.ids[scored].long(),
        "places": tree.number[scored],
        "prediction_of": prediction_of,
        "source_of": torch.full((number,), len(cells)).scatter_reduce(0, prediction_of, every, "amin"),
    }
    response_mask = response_mask.cpu()
    layout = TokenLayout(
        **tensors,
        response_mask=response_mask,
        cells=response_mask.nonzero(as_tuple=True),
        attention=attention,
        num_tokens=int(tree.run.sum()),
        shares=not torch.equal(prediction_of, every),
    )
    return layout.to(input_ids.device)


class _Tree(NamedTuple):
    run: Tensor  # [b, W] bool, where each token that is run occurs for the first time
    owner: Tensor  # [b, W] long, the row in which the token of each cell occurs for the first time
    number: Tensor  # [b, W] long, the number of the token of each cell; −1 if it is not run
    inherited: Tensor  # [b, W] bool, the tokens of a row that are run with a row before, if they predict something
    begin: Tensor  # [b + 1] long, the number of tokens of the rows before
    end: Tensor  # [N] long, the number that follows those of a token's descendants


def _number_tokens(valid: Tensor, new: Tensor) -> _Tree:
    """The tokens ``valid [b, W]`` of rows; `new` is True from where a row differs from the row before."""
    rows, columns = torch.arange(len(valid))[:, None], torch.arange(valid.shape[1])
    owner = first_rows(new)
    cells = owner * valid.shape[1] + columns  # Where in a `[b, W]` table a token occurs for the first time.
    followed = valid & torch.nn.functional.pad(valid[:, 1:], (0, 1))
    run = torch.zeros_like(valid)
    run.view(-1)[cells[followed]] = True
    number = torch.where(run.flatten(), run.flatten().cumsum(0) - 1, -1)
    begin = torch.nn.functional.pad(run.sum(1).cumsum(0), (1, 0))
    # The first later row that does not pass through a token has at most the columns before it in common.
    leaves = torch.where(new, rows, len(valid)).roll(-1, 0)
    leaves[-1] = len(valid)
    end = begin[leaves.flip(0).cummin(0).values.flip(0)][run]
    return _Tree(run, owner, number[cells], followed & ~new, begin, end)


def _units(tree: _Tree, starts: Sequence[int]) -> _AttentionUnits:
    first, sizes = _join_rows(tree.run.sum(1).tolist(), starts)
    counts = torch.tensor(sizes)
    spans = _spans(tree, first, sizes)
    queries, paths = pad_sequence(spans, batch_first=True), _paths(tree, first, spans)
    keys = pad_sequence(paths, batch_first=True)
    is_query = torch.arange(queries.shape[1]) < counts[:, None]
    is_key = torch.arange(keys.shape[1]) < torch.tensor([len(p) for p in paths])[:, None]
    query_number, key_number = queries[:, :, None], keys[:, None]
    mask = (key_number <= query_number) & (query_number < tree.end[keys][:, None]) & is_key[:, None]
    mask[..., 0] |= ~is_query  # A query that is padding has to attend to something.
    output_of = torch.zeros(len(tree.end), dtype=torch.long)
    output_of[queries[is_query]] = is_query.flatten().nonzero().squeeze(1)
    return _AttentionUnits(queries, keys, mask, output_of)


def _spans(tree: _Tree, first: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """The numbers of the tokens that units add, from their first rows and their numbers of queries."""
    begins = (int(tree.begin[row]) for row in first)
    return [torch.arange(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _paths(tree: _Tree, first: Sequence[int], spans: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of the keys of units: the path to the first query, and the queries."""
    return [torch.cat([tree.number[row][tree.inherited[row]], span]) for row, span in zip(first, spans, strict=True)]


def _join_rows(token_counts: Sequence[int], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first row of each attention unit, and its number of queries, from the tokens that each row adds to its tree.

    Rows that add few tokens are joined, which costs no padding up to the number of queries of the longest row.
    """
    most, trees = max(token_counts), set(starts)
    first: list[int] = []
    sizes: list[int] = []
    for row, added in enumerate(token_counts):
        if not first or row in trees or sizes[-1] + added > most:
            first.append(row)
            sizes.append(0)
        sizes[-1] += added
    indices = [k for k, size in enumerate(sizes) if size]
    return [first[k] for k in indices], [sizes[k] for k in indices]


# --- `varlen_attn`, whose cost is that of flash attention for whole rows ----------------------------------------------


class _AlongPaths(torch.autograd.Function):
    """``[N, heads, d] -> [sum of the paths, heads, d]``, keys and values; gradients are summed in float32.

    One function for both, because a small model on a GPU waits for Python.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, paths: _Paths) -> tuple[Tensor, Tensor]:
        ctx.paths = paths
        return keys.index_select(0, paths.keys), values.index_select(0, paths.keys)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        paths: _Paths = ctx.paths
        sums = []
        for gradient in gradients:
            total, more = (full_precision(gradient.index_select(0, places)) for places in (paths.own, paths.inherited))
            sums.append(total.index_add_(0, paths.inherited_keys, more).to(gradient.dtype))
        return *sums, None


def _keys_of_rows(tree: _Tree) -> Tensor:
    """``[b]``: the number of keys of each row that adds tokens."""
    return torch.where(tree.run.any(1), (tree.inherited | tree.run).sum(1), 0)


def _by_rows(tree: _Tree) -> _Paths:
    first = [row for row, added in enumerate(tree.run.sum(1).tolist()) if added]
    sizes = [int(tree.run[row].sum()) for row in first]
    paths = _paths(tree, first, _spans(tree, first, sizes))
    counts = torch.tensor([sizes, [len(path) for path in paths]])
    begins = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    is_own = torch.cat([torch.arange(len(path)) >= len(path) - size for path, size in zip(paths, sizes, strict=True)])
    keys = torch.cat(paths)
    own, inherited = (places.nonzero().squeeze(1) for places in (is_own, ~is_own))
    most = int(counts[0].max()), int(counts[1].max())
    return _Paths(keys, own, inherited, keys[inherited], (begins[0], begins[1]), most)

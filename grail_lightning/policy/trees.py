"""Rows that begin alike, laid out as prefix trees: what several of them begin with is run once.

Shapes: ``B`` rows, ``W`` columns, ``T`` response tokens; ``G`` trees of at most ``N`` tokens, ``M`` predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.functional.tokens import full_precision
from grail_lightning.policy.model import Policy
from grail_lightning.policy.prefix import may_share
from grail_lightning.rollout import RolloutBatch, micro_batches

MOST = 8192
"""Tokens of a tree of several rows: its mask has the square of that many numbers."""


class PrefixTrees:
    r"""Rows as trees of tokens, each tree one sequence in which a token attends to what stands before it in its rows.

    Rows come in an order in which those that begin alike are neighbours. A token is new where its row differs from the
    one before, so that new tokens, row by row, are each tree in preorder: what follows token `j` in any row stands at
    ``j … end_j - 1``, and token `i` attends to `j` where ``j ≤ i < end_j``. What a row ends with predicts nothing and
    is left out.

    Args:
        input_ids: ``[B, W]``; prompts padded left, and responses right.
        attention_mask: ``[B, W]`` bool.
        response_mask: ``[B, T]`` bool.
        starts: At which rows a tree begins; ascending, the first is 0.

    Attributes:
        ids: ``[G, N]`` long, padded right.
        positions: ``[G, N]`` long, how many tokens stand before each in its rows.
        ends: ``[G, N]`` long, ``end_j``; padding is followed by nothing.
        before: ``[M]`` long, the place in ``[G * N]`` of the token that predicts each response token.
        targets: ``[M]`` long, the response tokens.
        of: ``[response_mask.sum()]`` long, which of the `M` each response token of the rows is.
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, starts: Sequence[int]) -> None:
        device, width = input_ids.device, input_ids.shape[1] - response_mask.shape[1]
        ids, valid, responses = input_ids.cpu(), attention_mask.cpu(), response_mask.cpu()
        rows, columns = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1])
        shared = _common(ids, valid)
        shared[list(starts)] = 0
        new = columns >= shared[:, None]
        owner = torch.where(new, rows, 0).cummax(0).values
        cells = owner * ids.shape[1] + columns  # Where in a `[B, W]` table a token stands for the first time.

        followed = valid & torch.nn.functional.pad(valid[:, 1:], (0, 1))
        run = torch.zeros_like(valid)
        run.view(-1)[cells[followed]] = True
        number = (run.flatten().cumsum(0) - 1).view_as(ids)
        begin = torch.nn.functional.pad(run.sum(1).cumsum(0), (1, 0))  # `[B + 1]`: the tokens of the rows before.
        first = begin[torch.tensor([*starts, len(ids)])]
        tree = torch.bucketize(rows[:, 0], torch.tensor(starts), right=True) - 1
        longest = max(1, int(first.diff().max()))
        # From a token's number to its place among padded trees.
        shift = (tree * longest - first[tree])[:, None]
        # The next row that does not go through a token is the first one with no more than its column in common.
        leaves = torch.where(new, rows, len(ids)).roll(-1, 0)
        leaves[-1] = len(ids)
        end = begin[leaves.flip(0).cummin(0).values.flip(0)] + shift

        places = (number + shift)[run]
        slots = torch.arange(len(starts) * longest)
        ends = (slots + 1).index_copy(0, places, end[run]).view(-1, longest)
        slots = slots.view(-1, longest)
        self.ends = (ends - slots[:, :1]).to(device)
        self.ids = torch.zeros_like(slots).view(-1).index_copy(0, places, ids[run].long()).view_as(slots).to(device)
        depth = valid.cumsum(1) - 1
        self.positions = torch.zeros_like(slots).view(-1).index_copy(0, places, depth[run]).view_as(slots).to(device)

        scored = new[:, width:] & responses
        self.before = (number.view(-1)[cells] + shift)[:, width - 1 : -1][scored].to(device)
        self.targets = ids[:, width:][scored].long().to(device)
        index = (scored.flatten().cumsum(0) - 1).view_as(scored)
        self.of = index[owner[:, width:], columns[: scored.shape[1]]][responses].to(device)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """``[G, 1, N, N]``, to be added to the scores of attention: 0 where a token (last but one) attends to another.

        SDPA would convert another kind of mask, and keep that, in each layer.
        """
        (trees, number), device = self.ends.shape, self.ends.device
        # CUDA's kernels would copy a mask whose rows do not begin at multiples of 16.
        shape = (trees, 1, number, number + -number % 16)
        found = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=device)[..., :number]
        place = torch.arange(number, device=device)
        attends = (place <= place[:, None]) & (place[:, None] < self.ends[:, None, None])
        return found.masked_fill_(attends, 0)

    def predictors(self, states: Tensor) -> Tensor:
        """``[G, N, D] -> [M, D]``: the decoder's output from which each response token is predicted."""
        return look_up(states.flatten(0, 1), self.before)

    def spread(self, values: Tensor) -> Tensor:
        """``[M] -> [response_mask.sum()]``: what was found of each prediction, for all rows that make it."""
        return look_up(values[:, None], self.of).squeeze(1)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """The rows ``table[index]``; gradients of many rows add up in float32 at least, and always in the same order."""
    return torch.nn.functional.embedding(index, full_precision(table)).to(table.dtype)


class Grove(NamedTuple):
    """A micro-batch of trees: the rows ``[b]`` long of `PrefixTrees`, where a tree begins, and how many tokens run."""

    rows: Tensor
    starts: list[int]
    tokens: int


def cut_into_trees(batch: RolloutBatch, rows: Tensor, token_budget: int, span: float) -> tuple[list[Grove], float]:
    """Micro-batches within a token budget, in which rows of a group that begin alike share a tree if that pays.

    A sequence of `n` tokens is taken to cost ``n (1 + n / span)``: every token of a tree is held against every other,
    and so rows that differ early are better off in trees of their own.

    Args:
        batch: ``B`` rows.
        rows: ``[n]`` long, which of them; at least one.
        token_budget: Most padded tokens of a micro-batch.
        span: To how many others a token attends at the cost of everything else that is done for it.

    Returns:
        Longest trees first; and the share of the cost of whole rows that is saved.
    """
    order = rows.cpu()[_alike_beside_each_other(batch, rows)]
    ids, valid, group = (t.cpu()[order] for t in (batch.input_ids, batch.attention_mask, batch.group))
    padding = (~valid[:, : batch.prompt_width]).sum(1)
    shared = (_common(ids, valid) - padding).clamp(min=0).tolist()
    lengths = (valid.sum(1) - 1).tolist()  # Of what a row ends with nothing is asked.

    def cost(tokens: int) -> float:
        return tokens * (1 + tokens / span)

    trees: list[list[int]] = []
    sizes: list[int] = []
    reach = 0  # How many of a row's first tokens its tree runs.
    for k, length in enumerate(lengths):
        if k and group[k] == group[k - 1]:
            there = min(shared[k], reach)
            grown = sizes[-1] + max(0, length - there)
            if grown <= min(token_budget, MOST) and cost(grown) < cost(sizes[-1]) + cost(length):
                trees[-1].append(k)
                sizes[-1], reach = grown, max(length, there)
                continue
        trees.append([k])
        sizes.append(length)
        reach = length
    groves = []
    for part in micro_batches(torch.tensor(sizes, dtype=torch.long), token_budget):
        members = [trees[k] for k in part.tolist()]
        starts = list(itertools.accumulate(map(len, members[:-1]), initial=0))
        groves.append(Grove(order[list(itertools.chain(*members))], starts, sum(sizes[k] for k in part.tolist())))
    return groves, 1 - sum(map(cost, sizes)) / sum(map(cost, lengths))


def _alike_beside_each_other(batch: RolloutBatch, rows: Tensor) -> list[int]:
    """An order of `rows`, group by group, in which those with a common beginning are neighbours."""
    keys = list(zip(batch.group.cpu()[rows].tolist(), _as_bytes(batch, rows), strict=True))
    return sorted(range(len(rows)), key=keys.__getitem__)


def _as_bytes(batch: RolloutBatch, rows: Tensor) -> list[bytes]:
    """The tokens of some rows, padding included: to be compared and ordered."""
    return [row.tobytes() for row in batch.input_ids.cpu()[rows].int().numpy()]


def first_alike(batch: RolloutBatch, rows: Tensor) -> Tensor:
    """``[n]`` long: for each of `rows` the first that says the same to the same prompt with the same advantage."""
    assert batch.advantages is not None
    others = (values.cpu()[rows].tolist() for values in (batch.group, batch.response_lengths, batch.advantages))
    keys = zip(_as_bytes(batch, rows), *others, strict=True)
    seen: dict[Any, int] = {}
    first = [seen.setdefault(key, row) for key, row in zip(keys, rows.tolist(), strict=True)]
    return torch.tensor(first, dtype=torch.long)


def _common(ids: Tensor, valid: Tensor) -> Tensor:
    """``[B]``: how many columns each row has in common with the one before, padding on the left included."""
    same = (ids[1:] == ids[:-1]) & (valid[1:] == valid[:-1]) | ~valid[1:] & ~valid[:-1]
    return torch.nn.functional.pad(same.int().cumprod(1).sum(1), (1, 0))


def can_branch(policy: Policy) -> bool:
    """Whether the model runs trees as it does whole rows; tried once. Under FSDP every rank must come here.

    Not with dropout (every row has its own), packed blocks, and attention that takes no mask of our own.
    """
    if not may_share(policy):
        return False
    if policy.branches is None:
        policy.branches = _branches(policy)
    return policy.branches


def reaches(policy: Policy, width: int) -> bool:
    """Whether every block attends as far as `width` columns: windows do not know the way through a tree."""
    config = policy.model.config.get_text_config()
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return all(window is None or width <= window for window in windows)


def _branches(policy: Policy) -> bool:
    """Compare three rows in one tree with the same rows apart."""
    try:
        with policy.trial(3, 9) as (ids, mask), torch.compiler.set_stance("force_eager"):
            ids[1, :6], ids[2, :8] = ids[0, :6], ids[0, :8]
            mask[:, 0] = mask[1, 7:] = False
            responses = mask[:, 4:]
            whole, found = (
                policy(ids, mask, responses, trees=trees).logprobs[responses]
                for trees in (None, PrefixTrees(ids, mask, responses, [0]))
            )
    except Exception:  # Whatever a model says that wants another mask.
        return False
    return bool((found - whole).norm() < torch.finfo(policy.compute_dtype).eps ** 0.5 * (whole - whole.mean()).norm())

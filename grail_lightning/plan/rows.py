"""The largest micro-batch that a config allows. Pure.

Every response is taken to be as long as the limit, and rows of a group to share their prompt alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grail_lightning.batch.rows import micro_batches
from grail_lightning.policy.flex import BLOCK_TOKENS
from grail_lightning.policy.micro_batch import cut_into_trees
from grail_lightning.policy.trees import TreeKernel, join_rows


@dataclass(frozen=True, kw_only=True)
class MicroShape:
    """The sizes of a micro-batch.

    Attributes:
        rows: The number of rows.
        tokens: The number of places for tokens in the decoder's input, padding included.
        predictions: The number of tokens that are scored.
        trees: What computes attention in prefix trees; None if rows are separate.
        units: Numbers of attention units, and of queries and keys of each, if SDPA computes it.
    """

    rows: int
    tokens: int
    predictions: int
    trees: TreeKernel | None = None
    units: tuple[int, int, int] | None = None


def largest_micro_batch(
    groups: int,
    group_size: int,
    prompt: int,
    response: int,
    token_budget: int,
    *,
    trees: TreeKernel | None,
    share: bool = True,
) -> MicroShape:
    """The micro-batch with most tokens among those into which a rank's rows are cut.

    Args:
        groups: The number of the rank's prompts.
        group_size: The number of rows of each prompt.
        prompt: Tokens of a prompt.
        response: Tokens of a response.
        token_budget: Most tokens of a micro-batch.
        trees: What computes attention if rows are run as prefix trees.
        share: Whether the last token of the prompt is shared, too; see `tree_layout`.
    """
    rows, width = groups * group_size, prompt + response
    if trees is None:
        (part, *_) = micro_batches(torch.full((rows,), width), token_budget)
        return MicroShape(rows=len(part), tokens=len(part) * (width - 1), predictions=len(part) * response)
    ids, valid = torch.zeros(rows, width, dtype=torch.int32), torch.ones(rows, width, dtype=torch.bool)
    group = torch.arange(groups).repeat_interleave(group_size)
    ids[:, :prompt] = group[:, None]
    ids[:, prompt] = torch.arange(rows)  # Responses differ from their first token on.
    cut = cut_into_trees(ids, valid, group, token_budget, prompt_width=prompt, share_responses=share)
    shared = prompt if share else prompt - 1
    shapes = [_of_trees(len(batch.rows), batch.starts or [0], width, shared, response, trees) for batch in cut]
    return max(shapes, key=lambda shape: shape.tokens)


def _of_trees(rows: int, starts: list[int], width: int, shared: int, response: int, kernel: TreeKernel) -> MicroShape:
    """The sizes of a micro-batch of prefix trees. The last token of a row is not run."""
    inherited = [0 if row in starts else shared for row in range(rows)]
    own = [width - 1 - above for above in inherited]
    if kernel == "flex":
        tokens = -(-sum(own) // BLOCK_TOKENS) * BLOCK_TOKENS
        return MicroShape(rows=rows, tokens=tokens, predictions=rows * response, trees=kernel)
    first, sizes = join_rows(own, starts)
    keys = max(inherited[row] + size for row, size in zip(first, sizes, strict=True))
    units = (len(first), max(sizes), keys)
    return MicroShape(rows=rows, tokens=sum(own), predictions=rows * response, trees=kernel, units=units)

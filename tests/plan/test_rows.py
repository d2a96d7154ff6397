"""The largest micro-batch that a config allows."""

import pytest
import torch

from grail_lightning.plan.rows import largest_micro_batch
from grail_lightning.policy.micro_batch import cut_into_trees
from grail_lightning.policy.trees import tree_layout


def test_separate_rows_fill_the_budget():
    # Rows of 5 + 7 = 12 tokens: 8 of them are 96 tokens. The last token of each row is not run.
    shape = largest_micro_batch(4, 4, prompt=5, response=7, token_budget=100, trees=None)
    assert (shape.rows, shape.tokens, shape.predictions, shape.units) == (8, 8 * 11, 8 * 7, None)


def test_rows_of_a_group_share_their_prompt():
    # The first row runs 5 + 7 − 1 = 11 tokens, each of the others its 6 own ones.
    shape = largest_micro_batch(1, 4, prompt=5, response=7, token_budget=100, trees="sdpa")
    assert (shape.rows, shape.tokens, shape.predictions) == (4, 11 + 3 * 6, 28)
    # Units have at most 11 queries, so that no two of the others are joined; each sees the prompt as well.
    assert shape.units == (4, 11, 11)


def test_a_rank_with_few_rows_has_a_smaller_micro_batch():
    assert largest_micro_batch(1, 2, prompt=5, response=7, token_budget=1000, trees=None).rows == 2


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("prompt", "response"), [(3, 9), (20, 6), (9, 9)])
@pytest.mark.parametrize("budget", [40, 100, 1000])
def test_sizes_are_those_of_the_layout_that_a_step_makes(prompt, response, budget, share, kernel):
    """The oracle is the update's own way: rows are cut into trees, and a layout is made of them."""
    groups, size = 3, 4
    planned = largest_micro_batch(groups, size, prompt, response, budget, trees=kernel, share=share)
    ids = torch.zeros(groups * size, prompt + response, dtype=torch.long)
    ids[:, prompt:] = torch.arange(1, groups * size + 1)[:, None]
    valid = torch.ones_like(ids, dtype=torch.bool)
    group = torch.arange(groups).repeat_interleave(size)
    ids[:, :prompt] = group[:, None]
    found = []
    for batch in cut_into_trees(ids, valid, group, budget, prompt_width=prompt, share_responses=share):
        rows = ids[batch.rows], valid[batch.rows], valid[batch.rows, prompt:]
        layout = tree_layout(*rows, batch.starts, share_responses=share, kernel=kernel)
        units = layout.attention(torch.float32).get("units")
        sizes = None if units is None else (len(units.queries), *units.mask.shape[2:])
        found.append((layout.ids.numel(), len(layout.targets), sizes))
    assert (planned.tokens, planned.predictions, planned.units) == max(found, key=lambda sizes: sizes[0])

"""Rows are cut into micro-batches."""

import pytest
import torch

from grail_lightning.batch import micro_batches


@pytest.mark.parametrize("budget", [7, 40])
def test_micro_batches_hold_each_row_once_and_keep_to_the_budget(budget):
    lengths = torch.randint(1, 20, (50,), generator=torch.Generator().manual_seed(0))
    cuts = micro_batches(lengths, budget)
    assert lengths.argmax() in cuts[0], "a lack of memory shows at once"
    assert sorted(torch.cat(cuts).tolist()) == list(range(50))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * lengths[cut].max() <= budget


def test_the_token_budget_counts_the_padding_of_prompts_and_responses_separately():
    """1000 + 24 and 24 + 1000 tokens pad to 1000 + 1000 each: together 4000, not 2048."""
    lengths = torch.tensor([[1000, 24], [24, 1000], [900, 20]])
    assert [cut.tolist() for cut in micro_batches(lengths, 2048)] == [[0], [1], [2]]
    assert [cut.tolist() for cut in micro_batches(lengths, 4000)] == [[0, 1], [2]]

"""Cutting and trimming the records."""

import pytest
import torch

from grail_lightning.core.rollout.batch import lengths_to_mask, micro_batches, pad_left


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


def test_padding_by_hand():
    ids, mask = pad_left([[1, 2], [3]], pad=0)
    assert ids.tolist() == [[1, 2], [0, 3]]
    assert mask.tolist() == [[True, True], [False, True]]
    assert lengths_to_mask(torch.tensor([2, 0]), 3).tolist() == [[True, True, False], [False, False, False]]


def test_selecting_rows_trims_to_their_longest_prompt_and_response(golden_batch):
    rows = torch.tensor([1, 2])
    some = golden_batch.select(rows)
    assert some.prompt_width == golden_batch.prompt_lengths[rows].max()
    assert some.response_ids.shape[1] == golden_batch.response_lengths[rows].max()
    for k, row in enumerate(rows.tolist()):
        whole = golden_batch.input_ids[row][golden_batch.attention_mask[row]]
        assert torch.equal(some.input_ids[k][some.attention_mask[k]], whole)
        assert some.answer.whole[k].sum() == golden_batch.answer.whole[row].sum()

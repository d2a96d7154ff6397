import pytest
import torch

from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.functional import answer_overwrite, bilevel_map, grail_map, mean_one


def test_both_clamps_bind():
    scores = torch.tensor([[1e-9] + [1.0] * 30 + [1e9]])
    found = grail_map(scores, torch.ones_like(scores, dtype=torch.bool), std=2.0, w_max=3.0)
    assert found.min() == 0.5
    assert found.max() == 3.0
    with pytest.raises(ValueError, match="`w_min` ≤ `w_max`"):
        grail_map(scores, scores > 0, w_min=2, w_max=1)


def test_a_token_that_straddles_brace_and_content_takes_the_markers_weight():
    content = torch.tensor([[False, False, True, True, False, False]])
    marker = torch.tensor([[False, True, False, True, False, False]])
    after = torch.tensor([[False, False, False, False, True, True]])
    answer = AnswerMasks(whole=content | marker, content=content, marker=marker, after=after)
    mask = torch.tensor([[True, True, True, True, True, False]])
    weights = torch.full((1, 6), 0.7)
    found = answer_overwrite(weights, answer, mask, content=5.0, rest=1.0)
    assert found.tolist() == [pytest.approx([0.7, 1.0, 5.0, 1.0, 1.0, 0.0])]
    assert torch.equal(weights, torch.full((1, 6), 0.7)), "arguments are never written into"


def test_constant_scores_get_weight_one():
    mask = torch.tensor([[True, True, False]])
    assert bilevel_map(torch.full((1, 3), 0.3), mask).tolist() == [[1.0, 1.0, 0.0]]


def test_scores_too_small_for_float32_still_order_the_tokens():
    scores = torch.tensor([[1e-9, 2e-9, 3e-9, 4e-9]], dtype=torch.float32)
    found = bilevel_map(scores, torch.ones(1, 4, dtype=torch.bool))[0]
    assert (found.diff() > 0).all()


def test_mean_one_keeps_the_shape_and_fixes_the_mean():
    weights = torch.tensor([[1.0, 3.0, 9.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    found = mean_one(weights.masked_fill(~mask, 0), mask)
    assert found.tolist() == [[0.5, 1.5, 0.0], [0.0, 0.0, 0.0]]

import math

import pytest
import torch

from grail_lightning.batch import AnswerMasks
from grail_lightning.functional import answer_overwrite, bilevel_map, grail_map, mean_one
from tests.tolerance import near


def test_grail_weights_are_clamped_z_scores_of_the_log_saliency():
    scores = torch.tensor([[0.1, 1.0, 10.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    logs = [math.log(s + 1e-8) for s in (0.1, 1.0, 10.0)]
    mean = sum(logs) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3 + 1e-8)
    expected = [min(max(1 + 0.5 * (x - mean) / std, 0.5), 5.0) for x in logs]
    found = grail_map(scores, mask)
    assert found[0, :3].tolist() == near(expected, 1000)
    assert found[0, 3] == 0


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


def _bilevel_row(scores, tau, beta, floor, interpolate):
    """The bi-level map of one row, with plain lists."""
    logs = [math.log1p(s) for s in scores]
    low, high = min(logs), max(logs)
    scaled = [(x - low) / (high - low) for x in logs]
    ordered = sorted(scaled)
    if interpolate:
        place = tau * (len(ordered) - 1)
        k = int(place)
        q = ordered[k] + (ordered[min(k + 1, len(ordered) - 1)] - ordered[k]) * (place - k)
    else:
        q = ordered[int(tau * len(ordered))]
    raw = [max(x / q, floor) if x < q else 1 + beta * (x - q) / (1 - q) for x in scaled]
    return [w * len(raw) / sum(raw) for w in raw]


@pytest.mark.parametrize("interpolate", [True, False])
def test_the_bilevel_map_equals_a_loop(interpolate):
    torch.manual_seed(1)
    scores = torch.rand(3, 11, dtype=torch.float64)
    mask = torch.arange(11) < torch.tensor([11, 7, 3])[:, None]
    found = bilevel_map(scores, mask, interpolate=interpolate)
    for row, length in enumerate([11, 7, 3]):
        expected = _bilevel_row(scores[row, :length].tolist(), 0.4, 2.0, 0.1, interpolate)
        assert found[row, :length].tolist() == near(expected, 10**6)
        assert found[row, :length].sum().item() == near(length, 10**6)
    assert (found[~mask] == 0).all()


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

"""OAR-P against the golden tensors, and against loops that perturb one token at a time."""

import json
import math
from functools import partial

import pytest
import torch

from grail_lightning.batch import AnswerMasks
from grail_lightning.credit import OARPerturbation
from tests.conftest import GOLDEN
from tests.credit.rollouts import assert_golden, context, row_perturbation
from tests.tolerance import near

_context = partial(context, budget=2000)


@pytest.fixture(scope="module")
def exact_batch(golden_batch):
    """The golden rows with the exact span of their last box."""
    whole = torch.zeros_like(golden_batch.response_mask)
    for row, boxes in json.loads((GOLDEN / "spans.json").read_text()).items():
        if boxes:
            whole[int(row), boxes[-1]["tokens"]] = True
    none = torch.zeros_like(whole)
    return golden_batch.replace(answer=AnswerMasks(whole=whole, content=none, marker=none, after=none))


def test_scores_and_weights_equal_the_golden_tensors(golden, golden_policy, exact_batch):
    assert golden_policy.supports_kv_continuation
    weights = OARPerturbation()(golden_policy, exact_batch, _context())
    mask = exact_batch.response_mask
    boxed = exact_batch.answer.whole.any(1)
    assert_golden(weights.scores[boxed], golden["oar_p.answer_mean.scores"][boxed], mask[boxed], 16)
    assert_golden(weights.values, golden["oar_p.answer_mean.weights"], mask)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize(("distribution", "share"), [("answer_mean", False), ("last", False), ("answer_joint", True)])
def test_each_score_equals_that_of_a_separate_forward_pass(
    distribution, share, golden_policy, exact_batch, monkeypatch
):
    monkeypatch.setitem(vars(golden_policy), "supports_kv_continuation", share)
    two = torch.tensor([0.0, -1.0, 1.0, 0.0, 0.0, 0.0])
    weights = OARPerturbation(distribution)(golden_policy, exact_batch.replace(advantages=two), context())
    found = weights.scores
    for row in (1, 2):
        first = exact_batch.answer.whole[row].nonzero()[0].item()
        for token in (0, 7, first - 1):
            by_hand = row_perturbation(golden_policy, exact_batch, row, token, distribution)
            assert found[row, token].item() == near(by_hand, 1000, torch.float32, scale=1e-5)
        assert (found[row, first:] == 0).all()
    assert (found[[0, 3, 4, 5]] == 0).all()
    if distribution == "answer_joint":  # A negative score has the weight of no change.
        row = int((found < 0).sum(1).argmax())
        assert (found[row] < 0).sum() > 1
        assert weights.values[row][found[row] < 0].unique().numel() == 1


@pytest.mark.parametrize("share", [True, False])
def test_only_rows_with_a_box_and_an_advantage_run_and_no_pass_exceeds_the_budget(
    share, golden_policy, exact_batch, monkeypatch
):
    monkeypatch.setitem(vars(golden_policy), "supports_kv_continuation", share)
    advantages = torch.zeros(6)
    advantages[[1, 4]] = -1.0  # row 4 has no box
    shapes = []
    hook = golden_policy.decoder.register_forward_hook(lambda _m, _i, out: shapes.append(out.last_hidden_state.shape))
    credit = OARPerturbation()
    weights = credit(golden_policy, exact_batch.replace(advantages=advantages), _context(budget=700))
    hook.remove()
    answer = exact_batch.answer.whole[1].nonzero().flatten().tolist()
    prompt = int(exact_batch.prompt_lengths[1])
    whole = prompt + answer[-1] + 1  # cut off behind the answer
    each = 700 // whole
    starts = [prompt + first for first in range(0, answer[0], each)] if share else [0] * math.ceil(answer[0] / each)
    assert [shape[1] for shape in shapes] == [whole, *(whole - start for start in starts)]
    assert sum(shape[0] for shape in shapes) == 1 + answer[0], "the clean row, and one for each reasoning token"
    assert max(shape[0] for shape in shapes) == each
    others = [0, 2, 3, 4, 5]
    assert torch.equal(weights.values[others], exact_batch.response_mask[others].to(weights.values))

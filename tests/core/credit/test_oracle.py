"""Credit on the first flawed step, by hand."""

import pytest
import torch

from grail_lightning.credit import Oracle
from tests.core.credit.groups import SOUND, groups
from tests.core.credit.rollouts import context

LATE = "7+5=12\nThen\n12-3=9\n9+8=16\n\\boxed{16}"
EARLY = "7+5=2\n2-3=-1\n-1+8=6\n\\boxed{6}"  # misconception, inherited, slip
COPIED = "7+5=12\n12-3=9\n9+8=17\n\\boxed{1}"


def _weights(policy, *texts, **options):
    batch = groups(policy, ("7+5-3+8", list(texts)))
    return batch, Oracle(**options)(policy, batch, context())


def _spans(policy, batch, row, values):
    """The text of the tokens with a weight, and the sum of the weights over the number of tokens."""
    tokens = values[row].nonzero().flatten()
    text = policy.tokenizer.decode(batch.response_ids[row, tokens])
    return text, (values[row].sum() / batch.response_mask[row].sum()).item()


def test_a_wrong_response_has_its_credit_on_its_first_flawed_result(arithmetic):
    batch, weights = _weights(arithmetic, SOUND, EARLY, LATE, COPIED)
    assert torch.equal(weights.values[0], batch.response_mask[0].float())
    assert [_spans(arithmetic, batch, row, weights.values) for row in (1, 2, 3)] == [
        ("2", pytest.approx(1)),
        ("16", pytest.approx(1)),
        ("1", pytest.approx(1)),
    ]
    assert not weights.fallback.any()


def test_right_responses_are_moved_to_the_places_of_the_errors_on_request(arithmetic):
    """One wrong response errs in its first step, two in their third; the filler of one is no step."""
    batch, weights = _weights(arithmetic, SOUND, EARLY, LATE, LATE, right="balanced")
    length = batch.response_mask[0].sum().item()
    found = {t: round(v / length, 4) for t, v in enumerate(weights.values[0].tolist()) if v}
    third = SOUND.index("17\n")
    assert found == {4: 0.1667, 5: 0.1667, third: 0.3333, third + 1: 0.3333}
    assert not weights.fallback.any()
    # A wrong box is a step that right responses have not: they stay uniform, and are counted.
    batch, weights = _weights(arithmetic, SOUND, COPIED, right="balanced")
    assert torch.equal(weights.values[0], batch.response_mask[0].float())
    assert weights.fallback.tolist() == [True, False]


def test_weights_are_capped_on_request_and_a_response_without_a_flawed_step_is_uniform_and_counted(arithmetic):
    batch, whole = _weights(arithmetic, SOUND, EARLY, LATE, "7+5=12\n")
    assert whole.values.max() > 5
    for w_max in (5.0, 0.5):
        _, capped = _weights(arithmetic, SOUND, EARLY, LATE, "7+5=12\n", w_max=w_max)
        assert torch.equal(capped.values[1:3], whole.values[1:3].clamp(max=w_max))
        for row in (0, 3):
            assert torch.equal(capped.values[row], batch.response_mask[row].float())
        assert capped.fallback.tolist() == [False, False, False, True]

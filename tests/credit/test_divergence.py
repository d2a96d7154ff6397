"""DGPO against loops over the logits of the policy and of its reference."""

import math

import pytest
import torch

from grail_lightning.credit import DGPO
from tests.credit.rollouts import context, row_logits
from tests.runs import Watch, batches, module, trainer
from tests.tolerance import near

TEMPERATURE = 0.7


def _scores(policy, reference, batch, row, power):
    """The scores of a row's tokens, as a list."""
    found = []
    for own, other in zip(row_logits(policy, batch, row), row_logits(reference, batch, row), strict=True):
        p, q = (torch.softmax(z / TEMPERATURE, -1).tolist() for z in (own, other))
        overlap = sum(math.sqrt(a * b) for a, b in zip(p, q, strict=True))
        entropy = -sum(a * math.log(a) for a in p) / math.log(len(p))
        found.append((1 - overlap) * entropy**power)
    return found


@pytest.mark.parametrize("power", [1.0, 0.0, 2.0])
def test_weights_are_those_of_the_formula(power, golden_policy, reference, batch):
    given = context(temperature=TEMPERATURE, reference=reference)
    weights = DGPO(entropy_power=power, temperature=0.1)(golden_policy, batch, given)
    for row in range(5):
        scores = _scores(golden_policy, reference, batch, row, power)
        total = sum(math.exp(s / 0.1) for s in scores)
        expected = [len(scores) * math.exp(s / 0.1) / total for s in scores]
        assert weights.values[row, : len(scores)].tolist() == near(expected, 300, torch.float32, scale=2.0)
        assert max(expected) > 1.05
    assert torch.equal(weights.values[5], batch.response_mask[5].to(weights.values.dtype)), "no advantage"


def test_the_policy_itself_as_the_reference_gives_uniform_weights(golden_policy, batch):
    given = context(reference=golden_policy)
    found = DGPO()(golden_policy, batch, given).values
    assert found[batch.response_mask].tolist() == near([1.0] * int(batch.response_mask.sum()), 1000, torch.float32)


def test_a_run_keeps_the_policy_before_training_as_the_reference():
    watch, ours = Watch(), module(credit=DGPO())
    trainer(3, watch).fit(ours, batches(3, size=8))
    assert ours.reference is not None
    first, *_, last = (output.weights.scores.abs().max().item() for output in watch.outputs)
    assert first < 1e-5, "at the first step the policy is the reference"
    assert last > 10 * first
    assert last > 1e-5

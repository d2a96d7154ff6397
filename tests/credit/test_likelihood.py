"""Entropy and probability methods against loops over the model's own logits."""

import math

import pytest
import torch

from grail_lightning.credit import AdvantageReweighting, HighEntropy
from grail_lightning.functional.certainty import quantile_of_all
from tests.credit.rollouts import context, in_groups, row_logits
from tests.tolerance import near


def _entropies_by_hand(policy, batch, temperature):
    rows = []
    for row in range(len(batch)):
        entropies = []
        for z in row_logits(policy, batch, row) / temperature:
            p = (z - z.max()).exp() / (z - z.max()).exp().sum()
            entropies.append(-sum(x * math.log(x) for x in p.tolist() if x > 0))
        rows.append(entropies)
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_high_entropy_keeps_the_top_fifth_of_the_batch(temperature, golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    weights = HighEntropy()(golden_policy, batch, context(temperature=temperature))
    by_hand = _entropies_by_hand(golden_policy, batch, temperature)
    everything = sorted(h for row in by_hand for h in row)
    place = 0.8 * (len(everything) - 1)
    below = everything[int(place)]
    threshold = below + (everything[int(place) + 1] - below) * (place - int(place))
    for row, entropies in enumerate(by_hand):
        expected = [float(h >= threshold) for h in entropies]
        assert weights.values[row, : len(entropies)].tolist() == expected
        assert weights.scores[row, : len(entropies)].tolist() == near(entropies, 100, torch.float32)
    assert weights.values.sum().item() / len(everything) == pytest.approx(0.2, abs=2 / len(everything))
    assert (weights.values[~batch.response_mask] == 0).all()


def test_all_tokens_are_kept_on_request(golden_policy, golden_batch):
    weights = HighEntropy(share=1.0)(golden_policy, golden_batch, context())
    assert torch.equal(weights.values.bool(), golden_batch.response_mask)


def test_reweighting_grows_with_the_tokens_probability(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    weights = AdvantageReweighting()(golden_policy, batch, context(temperature=0.7))
    for row in range(5):  # row 5 has no advantage
        for t, z in enumerate(row_logits(golden_policy, batch, row) / 0.7):
            token = batch.response_ids[row, t]
            p = (z[token] - z.max()).exp() / (z - z.max()).exp().sum()
            assert weights.values[row, t].item() == near(0.2 * p.item() + 0.8, 16, torch.float32)
    assert torch.equal(weights.values[5].bool(), batch.response_mask[5])
    assert weights.values[5].max() == 1


def test_the_quantile_is_that_of_torch():
    values = torch.rand(37)
    for q in (0.0, 0.3, 0.8, 1.0):
        assert quantile_of_all(values, q).item() == near(torch.quantile(values.double(), q).item(), 1000)
    assert quantile_of_all(values[:0], 0.5) == 0

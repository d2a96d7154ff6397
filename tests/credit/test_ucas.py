"""UCAS against loops over the model's own logits."""

import math

import pytest
import torch

from grail_lightning.credit import UCAS
from grail_lightning.step.advantages import token_advantages
from tests.credit.rollouts import context, in_groups, row_logits
from tests.tolerance import near

TEMPERATURE = 0.7


def _by_hand(policy, batch, standardise):
    """The token advantages of the formula, as lists."""
    sums, logits = [], []
    for row in range(len(batch)):
        total, own = 0.0, []
        for t, raw in enumerate(row_logits(policy, batch, row)):
            z = (raw / TEMPERATURE).tolist()
            total += math.log(sum(math.exp(v) for v in z)) - sum(z) / len(z)
            own.append(raw[batch.response_ids[row, t]].item())
        sums.append(total)
        logits.append(own)
    low, high = min(min(own) for own in logits), max(max(own) for own in logits)
    result = []
    for row, own in enumerate(logits):
        members = [s for s, g in zip(sums, batch.group.tolist(), strict=True) if g == batch.group[row]]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((s - mean) ** 2 for s in members) / (len(members) - 1))
        sure = (sums[row] - mean) / (std + 1e-6) if standardise else sums[row] - mean
        advantage = batch.advantages[row].item()
        shaped = advantage * math.exp(-0.25 * sure if advantage > 0 else 0.35 * sure)
        lowered = [shaped - 0.05 * (u - low) / (high - low) for u in own]
        result.append([max(a, 0.0) if shaped > 0 else a for a in lowered])
    return result


def test_token_advantages_are_those_of_the_formula(golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    advantages = batch.advantages.clone()
    advantages[0] = 0.03  # small enough for the floor
    batch = batch.replace(advantages=advantages)
    weights = UCAS()(golden_policy, batch, context(temperature=TEMPERATURE))
    found = token_advantages(batch.advantages, weights)
    for row, expected in enumerate(_by_hand(golden_policy, batch, standardise=True)):
        assert found[row, : len(expected)].tolist() == near(expected, 100, torch.float32, scale=0.01)
        assert (found[row, len(expected) :] == 0).all()
    first = found[0][batch.response_mask[0]]
    assert 0 < (first == 0).sum() < len(first), "the floor is exact, and not everywhere"
    assert first.min() == 0
    assert found[5][batch.response_mask[5]].max() <= 0, "no advantage: the second stage alone"
    assert found[5].min() < 0


def test_only_the_centred_certainty_is_clamped_in_the_exponent(golden_policy, golden_batch):
    """Two rows of nearly the same certainty, so that the formula itself is within the limit."""
    batch = in_groups(golden_batch).select(torch.tensor([1, 1, 0, 3]))
    batch = batch.replace(
        group=torch.tensor([0, 0, 1, 1]), row=torch.arange(4), advantages=torch.tensor([1.0, -1.0, 1.0, -1.0])
    )
    weights = UCAS(standardise=False)(golden_policy, batch, context(temperature=TEMPERATURE))
    found = token_advantages(batch.advantages, weights)
    by_hand = _by_hand(golden_policy, batch, standardise=False)
    for row in (0, 1):
        assert found[row, : len(by_hand[row])].tolist() == near(by_hand[row], 100, torch.float32, scale=0.01)
    sums = weights.scores[2:].sum(1)
    assert (sums[0] - sums[1]).abs() / 2 * 0.25 > 20, "far beyond the limit"
    # C is c for row 2 and −c for row 3, so that both exponents, −0.25·c and 0.35·(−c), have the sign of −c.
    limit = math.exp(-20 if sums[0] > sums[1] else 20)
    assert weights.values[2:].amax(1).tolist() == pytest.approx([limit, limit])
    assert weights.values.isfinite().all()

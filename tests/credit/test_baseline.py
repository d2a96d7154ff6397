"""The optimal token baseline against loops over the model's own logits."""

import pytest
import torch

from grail_lightning.credit import OptimalBaseline
from grail_lightning.step.advantages import token_advantages
from tests.credit.rollouts import context, in_groups, row_logits
from tests.tolerance import near

REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.5, 2.0])


def _by_hand(policy, batch, temperature, tail):
    sums = []
    for row in range(len(batch)):
        total, own = 0.0, []
        for t, z in enumerate(row_logits(policy, batch, row) / temperature):
            p = torch.softmax(z, -1)
            total += (1 - 2 * p[batch.response_ids[row, t]] + (p * p).sum()).item()
            own.append(total)
        sums.append(own)
    advantages = []
    for row, own in enumerate(sums):
        members = [j for j in range(len(batch)) if batch.group[j] == batch.group[row]]
        line = []
        for t in range(len(own)):
            there = [j for j in members if t < len(sums[j])]
            baseline = sum(REWARDS[j].item() * sums[j][t] for j in there) / sum(sums[j][t] for j in there)
            line.append(REWARDS[row].item() - (0.0 if len(there) == 1 and tail == "zero" else baseline))
        advantages.append(line)
    return advantages


@pytest.mark.parametrize("tail", ["zero", "own"])
def test_advantages_are_those_of_the_formula(tail, golden_policy, golden_batch):
    batch = in_groups(golden_batch).replace(rewards=REWARDS)
    weights = OptimalBaseline(tail)(golden_policy, batch, context(temperature=0.7))
    found = token_advantages(batch.advantages, weights)
    lone = 0
    for row, expected in enumerate(_by_hand(golden_policy, batch, 0.7, tail)):
        assert found[row, : len(expected)].tolist() == near(expected, 1000, torch.float32, scale=1.0)
        assert (found[row, len(expected) :] == 0).all()
        lone += sum(value == 0 for value in expected)
    assert (lone > 0) == (tail == "own"), "some positions are reached by one row alone"


def test_a_group_without_an_advantage_has_none_and_is_not_run(golden_policy, golden_batch):
    batch = in_groups(golden_batch).replace(rewards=REWARDS)
    advantages = batch.advantages.clone()
    advantages[:3] = 0
    weights = OptimalBaseline()(golden_policy, batch.replace(advantages=advantages), context())
    assert (weights.additive[:3] == 0).all()
    assert (weights.additive[3:] != 0).any(1).all()
    assert (weights.values == 0).all()

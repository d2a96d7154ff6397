"""Estimators of the advantage, beside loops, TRL's formulas, and a class of the user's."""

import math

import pytest
import torch

from grail_lightning import (
    BNPO,
    GDPO,
    AdvantageContext,
    AdvantageEstimator,
    BatchNormalised,
    DrGRPO,
    GroupMean,
    LeaveOneOut,
)
from grail_lightning.core.step.assign import compute_advantages
from tests.batches import graded
from tests.core.credit.rollouts import context
from tests.runs import batches, module, trainer
from tests.tolerance import assert_near

NONE = math.nan
SIZE = 4
# Groups of four: mixed, equal, with one reward alone, with two, and without any.
REWARDS = [1.0, 0.25, 0.0, 0.5, 2.0, 2.0, 2.0, 2.0, NONE, 3.0, NONE, NONE, 1.0, NONE, 0.0, NONE] + [NONE] * 4


def _batch(golden_batch, rewards, values=None, weights=None):
    rows = torch.arange(len(rewards)) % len(golden_batch)
    batch = golden_batch.select(rows).replace(row=torch.arange(len(rewards)), group=torch.arange(len(rewards)) // SIZE)
    batch = graded(batch, torch.tensor(rewards, dtype=torch.float64), group=torch.arange(len(rewards)) // SIZE)
    if values is None:
        return batch
    told = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    factors = {name: torch.full((len(rewards),), factor, dtype=torch.float64) for name, factor in weights.items()}
    return batch.replace(reward_values=told, reward_weights=factors)


def _found(estimator, batch, policy):
    return compute_advantages(batch, SIZE, estimator, DrGRPO(mask_truncated=True), policy, context()).advantages


def _groups(rewards):
    for start in range(0, len(rewards), SIZE):
        yield [(row, rewards[row]) for row in range(start, start + SIZE) if not math.isnan(rewards[row])]


def _std(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def _centred(rewards, share=1.0, others=False):
    """By loops: the reward less a share of the group's mean, or less the mean of the others."""
    found = [0.0] * len(rewards)
    for members in _groups(rewards):
        known = [reward for _, reward in members]
        if len(known) < 2 or max(known) == min(known):
            continue
        for row, reward in members:
            base = (sum(known) - reward) / (len(known) - 1) if others else share * sum(known) / len(known)
            found[row] = reward - base
    return found


def _scored(rewards, values):
    return [value for value, reward in zip(values, rewards, strict=True) if not math.isnan(reward)]


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(scale, golden_policy, golden_batch):
    expected = torch.tensor(_centred(REWARDS, others=True), dtype=torch.float64)
    if scale == "batch":
        expected = expected / (_std(_scored(REWARDS, expected.tolist())) + 1e-4)
    found = _found(LeaveOneOut(scale=scale), _batch(golden_batch, REWARDS), golden_policy)
    assert found.dtype == torch.float32
    assert_near(found.double(), expected, 16, torch.float32)
    assert found[[0, 3]].abs().min() > 0.05


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_leave_one_out_equals_trls_formula(scale, golden_policy, golden_batch):
    """TRL's RLOO trainer: nansum of the others over their number, then a z-score over what can be scored."""
    rewards = torch.tensor([1.0, 0.25, 0.0, 0.5, NONE, 1.0, 0.0, 1.0], dtype=torch.float64)
    groups = rewards.reshape(-1, SIZE)
    number = (~groups.isnan()).sum(1, keepdim=True)
    others = (groups.nansum(1, keepdim=True) - groups.nan_to_num()) / (number - 1)
    theirs = (groups - others).reshape(-1)
    if scale == "batch":
        known = theirs[~theirs.isnan()]
        theirs = (theirs - known.mean()) / (known.std() + 1e-4)
    found = _found(LeaveOneOut(scale=scale), _batch(golden_batch, rewards.tolist()), golden_policy)
    assert_near(found.double(), theirs.nan_to_num(), 16, torch.float32)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_batch_normalised_divides_by_the_deviation_of_the_differences(share, golden_policy, golden_batch):
    centred = _centred(REWARDS, share)
    expected = torch.tensor(centred, dtype=torch.float64) / (_std(_scored(REWARDS, centred)) + 1e-4)
    found = _found(BatchNormalised(share=share), _batch(golden_batch, REWARDS), golden_policy)
    assert_near(found.double(), expected, 16, torch.float32)


def _gdpo(values, weights, rewards, scale_batch):
    """By loops, as TRL's `normalize_then_sum` with None values skipped; dead groups are 0."""
    summed = [0.0] * len(rewards)
    for members in _groups(rewards):
        if len(members) < 2:
            continue
        for name, column in values.items():
            known = [column[row] for row, _ in members if not math.isnan(column[row])]
            for row, _ in members:
                if not math.isnan(column[row]):
                    mean = sum(known) / len(known)
                    summed[row] += weights[name] * (column[row] - mean) / (_std(known) + 1e-4)
    if not scale_batch:
        return summed
    std = _std(_scored(rewards, summed))
    return [value / (std + 1e-4) for value in summed]


@pytest.mark.parametrize("scale_batch", [True, False])
def test_gdpo_standardises_each_reward_by_itself_and_tells_equal_totals_apart(scale_batch, golden_policy, golden_batch):
    # The totals of the first group are equal; the second is dead; in the third a function has no opinion of a row.
    values = {
        "right": [1.0, 0.0, 0.0, 0.5, 1, 1, 1, 1, 1.0, 0.0, NONE, 0.0],
        "format": [0.0, 1.0, 0.0, 0.5, 0, 0, 0, 0, 0.0, 0.5, 1.0, NONE],
        "length": [0.0, 0.0, 2.0, 0.0, 2, 2, 2, 2, 3.0, 1.0, 2.0, 0.0],
    }
    weights = {"right": 1.0, "format": 1.0, "length": 0.5}
    rewards = [
        sum(weights[name] * column[row] for name, column in values.items() if not math.isnan(column[row]))
        for row in range(12)
    ]
    expected = _gdpo(values, weights, rewards, scale_batch)
    batch = _batch(golden_batch, rewards, values, weights)
    found = _found(GDPO(scale_batch=scale_batch), batch, golden_policy)
    assert_near(found.double(), torch.tensor(expected, dtype=torch.float64), 64, torch.float32)
    assert len({rewards[row] for row in range(4)}) == 1
    assert found[:4].abs().max() > 0.01
    assert (found[4:8] == 0).all()
    assert GDPO().dead_groups(batch).tolist() == [False, True, False]


def test_gdpo_of_a_task_with_one_reward_of_its_own_is_that_of_this_reward(golden_policy, golden_batch):
    found = _found(GDPO(scale_batch=False), _batch(golden_batch, REWARDS), golden_policy)
    expected = _found(GroupMean(scale="group"), _batch(golden_batch, REWARDS), golden_policy)
    assert_near(found.double(), expected.double(), 16, torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda batch: batch.rewards, "`Mine` must return finite advantages, but got nan in row 8"),
        (lambda batch: torch.ones_like(batch.rewards), "`Mine` must return 0 for rows without a reward"),
        (lambda batch: batch.rewards[:3], "`Mine` must return advantages as a floating-point tensor of shape"),
        (lambda batch: [0.0], "Make it one with `torch.as_tensor`"),
    ],
)
def test_what_an_estimator_returns_is_checked(given, message, golden_policy, golden_batch):
    class Mine(AdvantageEstimator):
        def __call__(self, batch, group_size, context):
            assert isinstance(context, AdvantageContext)
            assert context.mask.shape == batch.response_mask.shape
            return given(batch)

    with pytest.raises(ValueError, match=message):
        _found(Mine(), _batch(golden_batch, REWARDS), golden_policy)


def test_an_estimator_that_is_a_class_is_refused():
    with pytest.raises(ValueError, match="`advantage` must be an object, an instance of `AdvantageEstimator`"):
        module(advantage=GroupMean)


@pytest.mark.parametrize(
    "estimator", [LeaveOneOut(), BatchNormalised(), BNPO(), GDPO()], ids=lambda e: type(e).__name__
)
def test_a_run_trains_with_each_estimator(estimator):
    run = trainer(1)
    run.fit(module(advantage=estimator), batches(1))
    assert run.global_step == 1

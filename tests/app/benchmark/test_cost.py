"""The cost of a step: counts of what is run and sampled, times and memory."""

import math

import pytest
import torch

from grail_lightning.app.benchmark.cost import cost_of, median_interval, peak_mib
from grail_lightning.app.benchmark.rollouts import open_world
from grail_lightning.app.benchmark.subjects import Subject
from grail_lightning.core.credit.base import TokenCredit, Uniform, uniform_weights
from grail_lightning.core.credit.measure import logprobs
from grail_lightning.credit import Resampled


class TwoPasses(TokenCredit):
    """Uniform credit that runs all rollouts twice before, and holds some memory."""

    def __call__(self, policy, batch, context):
        for _ in range(2):
            logprobs(policy, batch, context, torch.arange(len(batch)))
        held = torch.ones(128 * 2**18)  # 128 MiB
        weights = uniform_weights(batch)
        assert held.sum() > 0
        return weights


@pytest.fixture(scope="module")
def opened():
    with open_world("sums", 2) as world:
        yield world


def test_uniform_credit_costs_what_it_costs(opened):
    before = [p.clone() for p in opened.policy.parameters()]
    told = cost_of(opened, Subject(name="Uniform", method=Uniform()), seconds=0).figures["cost"]
    assert told["forward_passes"] == told["extra_tokens"] == 0
    assert abs(told["memory_mib"]) < 8
    estimate, low, high = told["step"]
    assert low < estimate < high
    assert all(torch.equal(p, q) for p, q in zip(opened.policy.parameters(), before, strict=True))


def test_passes_and_memory_of_a_method_are_counted(opened):
    """All 128 rows run twice; the step runs those of mixed groups, which here are more than half of them."""
    told = cost_of(opened, Subject(name="TwoPasses", method=TwoPasses()), seconds=0)
    cost = told.figures["cost"]
    mixed = sum(int(b.rewards.reshape(-1, 8).std(1).gt(0).sum()) for b in opened.batches) / 32
    assert 2 < cost["forward_passes"] < 2.5 / mixed
    assert 40 < cost["memory_mib"] < 128 + 20  # The peaks of a step are in its credit here, in its update there.
    assert told.reasons == {}


def test_sampled_tokens_are_counted_apart(opened):
    """Two continuations of each step's beginning, of few tokens each; their passes are no forward passes."""
    method = Resampled(2, search="bisection")
    told = cost_of(opened, Subject(name="Resampled", method=method), seconds=0)
    cost = told.figures["cost"]
    assert cost["memory_mib"] is None
    assert told.reasons == {"cost.memory_mib": "The memory of a step is not measured for methods that sample."}
    assert cost["extra_tokens"] > 0.05
    assert cost["forward_passes"] < 0.5


def test_the_peak_is_that_of_the_tensors_at_one_time():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        one = torch.ones(2**20)
        del one
        two = torch.ones(2**20), torch.ones(2**21)
        del two
    assert 12 <= peak_mib(profile) < 12.1


def test_the_interval_of_a_median_is_that_of_order_statistics():
    """Of six values it is the range: a binomial of 6 is outside of 1 ... 5 with a probability of 2 / 64."""
    assert median_interval([1.1, 1.2, 1.3, 1.5, 1.6, 1.7]) == pytest.approx([1.4, 1.1, 1.7])
    two = median_interval([1.0, math.e])
    assert two == pytest.approx([math.exp(0.5), math.exp(0.5 - 12.7062 * 0.5), math.exp(0.5 + 12.7062 * 0.5)], rel=1e-4)

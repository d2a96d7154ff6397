import copy
import math

import pytest
import torch

from grail_lightning.engines.vllm.probe import (
    EXACT,
    ROUNDED,
    Bound,
    check_gap,
    default_bound,
    measure_gap,
    probe_requests,
)
from grail_lightning.engines.vllm.requests import Completion
from tests.engines.test_vllm_requests import Sampler


@pytest.fixture(scope="module")
def requests(arithmetic):
    return probe_requests(arithmetic)


def _gap(trainer, sampler, requests):
    return measure_gap(trainer, requests, Sampler(sampler)(requests))


def test_a_sampler_with_the_same_weights_is_within_the_exact_bound(arithmetic, requests):
    gap = _gap(arithmetic, arithmetic, requests)
    assert gap.tokens == 16 * len(requests)
    assert 0 < gap.largest < EXACT.largest / 10
    check_gap(gap, EXACT, engine="Mine", dtypes="float32", since="at the start")


def test_one_weight_that_was_changed_is_noticed(arithmetic, requests):
    """One scale of one normalisation, doubled."""
    stale = copy.deepcopy(arithmetic)
    with torch.no_grad():
        stale.blocks[2].input_layernorm.weight[5] *= 2
    with pytest.raises(ValueError, match=r"differ by 0\.\d+ on average.* \(float32\)\. Likely causes: weights"):
        check_gap(_gap(arithmetic, stale, requests), EXACT, engine="Mine", dtypes="float32", since="after a push")


def test_a_temperature_that_is_not_applied_is_noticed_though_the_run_samples_at_one(arithmetic, requests):
    def at_one(request):
        return type(request)(request.prompt, {**request.parameters, "temperature": 1.0})

    completions = Sampler(arithmetic)([at_one(request) for request in requests])
    gap = measure_gap(arithmetic, requests, completions)
    with pytest.raises(ValueError, match="must agree"):
        check_gap(gap, ROUNDED, engine="Mine", dtypes="bfloat16", since="at the start")


def test_log_probabilities_after_top_k_are_noticed(arithmetic, requests):
    """Those are renormalised over the tokens that are left, here to twice the probability."""
    completions = [
        Completion(row.ids, [value + math.log(2) for value in row.logprobs]) for row in Sampler(arithmetic)(requests)
    ]
    gap = measure_gap(arithmetic, requests, completions)
    with pytest.raises(ValueError, match=r"differ by 0.693 on average"):
        check_gap(gap, ROUNDED, engine="Mine", dtypes="bfloat16", since="at the start")


def test_bounds_are_positive_and_follow_the_coarser_dtype():
    assert default_bound(torch.float32, torch.float64) == EXACT
    assert default_bound(torch.float32, torch.bfloat16) == ROUNDED
    with pytest.raises(ValueError, match=r"`bound.mean` must be positive, but got 0"):
        Bound(mean=0, largest=1)

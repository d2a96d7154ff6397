import copy
import math
from dataclasses import replace

import pytest
import torch

from grail_lightning.core.engines.vllm.probe import Bound, check_probe, probe_requests
from tests.core.engines.test_vllm_requests import Sampler


@pytest.fixture(scope="module")
def requests(arithmetic):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grail_lightning.core.engines.vllm.probe._GROUP", 1)
        return probe_requests(arithmetic)


@pytest.fixture(scope="module")
def completions(arithmetic, requests):
    """Those of a sampler with the same weights."""
    return Sampler(arithmetic)(requests)


def check(trainer, requests, completions, dtype=torch.float32, bound=None):
    return check_probe(trainer, requests, completions, engine="Mine", dtype=dtype, bound=bound, since="after a push")


def test_a_sampler_with_the_same_weights_is_well_within_the_exact_bound(arithmetic, requests, completions):
    said = check(arithmetic, requests, completions, bound=Bound(mean=1e-5, largest=1e-4))
    assert "at most over 64 tokens (sampler in float32, trainer in float32)." in said


def test_its_prompts_are_the_same_where_half_precision_is_the_default(arithmetic, requests, monkeypatch):
    """As in the steps of a module under ``bf16-true``: 447, the last id, rounds to 448 there."""
    monkeypatch.setattr("grail_lightning.core.engines.vllm.probe._GROUP", 1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert probe_requests(arithmetic) == requests
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_weight_that_was_changed_is_noticed(arithmetic, requests):
    """One scale of one normalisation, doubled. The bound of a sampler in half precision is wider."""
    stale = copy.deepcopy(arithmetic)
    with torch.no_grad():
        stale.blocks[2].input_layernorm.weight[5] *= 2
    completions = Sampler(stale)(requests)
    with pytest.raises(ValueError, match=r"after a push, within 0.0001 nats .* differ by 0\.\d+ on average.*float32"):
        check(arithmetic, requests, completions)
    check(arithmetic, requests, completions, torch.bfloat16, Bound(mean=1, largest=10))


def test_mistakes_are_noticed_even_within_the_bound_of_half_precision(arithmetic, requests, completions):
    """Exchanged temperatures; log-probabilities as after top-k, here to twice the probability; an undefined one."""
    warm = [
        type(row)(row.prompt, row.parameters | {"temperature": 1.7 - row.parameters["temperature"]}) for row in requests
    ]
    larger = [replace(row, logprobs=[value + math.log(2) for value in row.logprobs]) for row in completions]
    undefined = [replace(completions[0], logprobs=[math.nan] * 16), *completions[1:]]
    disagree = r"`Mine` and the trainer must agree .* within 0.12 nats"
    missing = r"`Mine` must report the log-probability of each token that it samples, but gave none .* for 16 of 64"
    for mistake, said in ((Sampler(arithmetic)(warm), disagree), (larger, disagree), (undefined, missing)):
        with pytest.raises(ValueError, match=said):
            check(arithmetic, requests, mistake, torch.bfloat16)


def test_an_answer_of_another_length_is_refused_with_the_name_of_the_engine(arithmetic, requests, completions):
    short = replace(completions[0], ids=completions[0].ids[:9], logprobs=completions[0].logprobs[:9])
    for answers in ([short, *completions[1:]], completions[1:]):
        with pytest.raises(ValueError, match=r"`Mine` must answer the 4 probes after a push with 16 tokens each, but"):
            check(arithmetic, requests, answers)

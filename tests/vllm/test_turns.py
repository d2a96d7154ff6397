"""Rollouts of several turns sampled by vLLM, in this process and on a server: `make test-vllm`."""

import pytest
import torch

from grail_lightning import HFEngine, Sampling, SearchData, VLLMEngine, VLLMServer, resolve_policy
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.episodes import play
from tests.vllm_servers import Served, python_with_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(python_with_vllm() is None, reason="vLLM is not installed")]


@pytest.fixture(params=["process", "server"])
def engine(request, tmp_path):
    if request.param == "process":
        yield VLLMEngine()
        return
    served = Served(resolve_policy("search"), tmp_path / "server.log").start()
    served.wait()
    made = VLLMServer([served.url], patience_seconds=200)
    yield made
    made.close()
    served.kill()


def test_greedy_rollouts_of_the_world_of_search_are_those_of_the_default_engine(engine):
    policy = load_policy("search").eval()
    (train,) = SearchData(num_train=8).load("train")
    batches = []
    for one in (engine, HFEngine()):
        one.update_weights(policy)
        sampling = Sampling(max_response_length=64, temperature=0)
        batches.append(play(one, policy, train.prompts, 2, sampling, range(16)))
    found, expected = batches
    assert expected.turn.max() >= 2
    assert torch.equal(found.input_ids, expected.input_ids)
    assert torch.equal(found.response_mask, expected.response_mask)
    assert torch.equal(found.turn, expected.turn)
    mask = expected.response_mask
    torch.testing.assert_close(found.sampling_logprobs[mask], expected.sampling_logprobs[mask], atol=1e-4, rtol=0)

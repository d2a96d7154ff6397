"""What `VLLMEngine` refuses before it starts anything, and what is changed in a worker of vLLM.

The forms of vLLM's samplers stand here as releases 0.32 and 0.33 have them.
"""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grail_lightning import VLLMEngine
from grail_lightning.core.engines.vllm.colocated import _completion
from grail_lightning.core.engines.vllm.worker import report_whole_vocabulary
from tests.runs import problems
from tests.shell import SHORT, fails

LOGITS = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
INSTALLED = importlib.util.find_spec("vllm") is not None


def test_it_has_no_weights_before_they_are_pushed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"Call `update_weights\(policy\)` first"):
        VLLMEngine().generate(problems(1), 1, None, 0)


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")
def test_a_run_without_vllm_ends_before_the_policy_is_loaded_with_what_to_install(capsys):
    line = fails(capsys, "fit", *SHORT, "--model.engine=VLLMEngine")
    assert "needs vLLM, which is not installed. Install it: pip install 'grail-lightning[vllm]'" in line


def _top_two(logits):
    """In place, as vLLM may do it."""
    return logits.masked_fill_(logits < logits.topk(2).values[:, -1:], -torch.inf)


class First(nn.Module):
    """`TopKTopPSampler` of the first model runner, with processed log-probabilities."""

    def forward(self, logits, generators, k, p):
        logits = logits if k is None and p is None else _top_two(logits)
        return logits.argmax(-1), logits.log_softmax(-1)


class Second:
    """`Sampler` of the second model runner, which computes log-probabilities from what the draw returns."""

    def _sample_random(self, processed_logits, mapping, numbers, pos, top_k, top_p, *use_fused_sampler):
        processed_logits = _top_two(processed_logits)  # Release 0.33 has one more argument at the end.
        return processed_logits.argmax(-1), processed_logits


def _reporting(sampler):
    report_whole_vocabulary(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    return sampler


@pytest.mark.parametrize("k", [None, torch.tensor([2, 2, 2])])
def test_both_model_runners_report_the_whole_vocabulary(k):
    first = _reporting(SimpleNamespace(topk_topp_sampler=First())).topk_topp_sampler
    tokens, logprobs = first(LOGITS.clone(), {}, k, None)
    assert torch.equal(tokens, LOGITS.argmax(-1))
    assert torch.equal(logprobs, LOGITS.log_softmax(-1))
    for flags in ((False,), (False, False)):
        tokens, logits = _reporting(Second())._sample_random(LOGITS.clone(), None, None, None, k, None, *flags)
        assert torch.equal(tokens, LOGITS.argmax(-1))
        assert torch.equal(logits, LOGITS)


def test_another_sampler_is_refused():
    with pytest.raises(ValueError, match="sampler SimpleNamespace is not known here"):
        _reporting(SimpleNamespace())


def test_a_token_whose_log_probability_vllm_leaves_out_has_none_and_a_response_without_any_is_named():
    """In vLLM's form: for each token a mapping from ids to their log-probabilities."""
    known = SimpleNamespace(logprob=-0.5)
    output = SimpleNamespace(token_ids=(4, 5, 6, 7), finish_reason="stop")
    output.logprobs = [
        {4: known, 9: SimpleNamespace(logprob=-0.1)},
        {9: known},
        None,
        {7: SimpleNamespace(logprob=None)},
    ]
    made = _completion(output)
    assert (made.ids, made.reason, made.logprobs[0]) == ([4, 5, 6, 7], "stop", -0.5)
    assert all(math.isnan(logprob) for logprob in made.logprobs[1:])
    for logprobs, said in ((None, "gave 0 for the 4"), ([{4: known}], "gave 1 for the 4")):
        output.logprobs = logprobs
        with pytest.raises(ValueError, match=said):
            _completion(output)

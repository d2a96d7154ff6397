"""What is changed in a worker of vLLM. The forms of its samplers stand here as releases 0.32 and 0.33 have them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grail_lightning.vllm_worker import report_whole_vocabulary

LOGITS = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))


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

    def _sample_random(self, processed_logits, mapping, numbers, pos, top_k, top_p, use_fused_sampler):
        processed_logits = _top_two(processed_logits)
        return processed_logits.argmax(-1), processed_logits


class SecondOf33(Second):
    def _sample_random(self, processed_logits, mapping, numbers, pos, top_k, top_p, only_top_p, use_fused_sampler):
        return super()._sample_random(processed_logits, mapping, numbers, pos, top_k, top_p, use_fused_sampler)


def _worker(sampler):
    return SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))


@pytest.mark.parametrize("k", [None, torch.tensor([2, 2, 2])])
def test_the_first_model_runner_reports_the_whole_vocabulary(k):
    sampler = SimpleNamespace(topk_topp_sampler=First())
    report_whole_vocabulary(_worker(sampler))
    tokens, logprobs = sampler.topk_topp_sampler(LOGITS.clone(), {}, k, None)
    assert torch.equal(tokens, LOGITS.argmax(-1))
    assert torch.equal(logprobs, LOGITS.log_softmax(-1))


@pytest.mark.parametrize(("kind", "more"), [(Second, 2), (SecondOf33, 3)])
def test_the_second_model_runner_reports_the_whole_vocabulary(kind, more):
    sampler = kind()
    report_whole_vocabulary(_worker(sampler))
    tokens, logits = sampler._sample_random(LOGITS.clone(), None, None, None, *[torch.tensor(2)] * more, False)
    assert torch.equal(tokens, LOGITS.argmax(-1))
    assert torch.equal(logits, LOGITS)


def test_another_sampler_is_refused():
    with pytest.raises(ValueError, match="sampler SimpleNamespace is not known here"):
        report_whole_vocabulary(_worker(SimpleNamespace()))

"""What `VLLMEngine` refuses before it starts anything, and what is changed in a worker of vLLM.

The forms of vLLM's samplers stand here as releases 0.32 and 0.33 have them.
"""

import configparser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

import grail_lightning
from grail_lightning.engines import VLLMEngine
from grail_lightning.engines.vllm import colocated, start
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.vllm_worker import report_whole_vocabulary
from tests.shell import SHORT, fails

LOGITS = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.2}, r"`gpu_memory_utilization` must lie in \(0, 1\], but got 1.2"),
        ({"cache_gib": 0}, "`cache_gib` must be positive or null, but got 0"),
        ({"max_model_len": -5}, "`max_model_len` must be positive or null, but got -5"),
        ({"tensor_parallel_size": 0}, "`tensor_parallel_size` must be at least 1, but got 0"),
        (
            {"options": {"model": "x", "seed": 1, "dtype": "half"}},
            "leave out what the engine sets itself, but got dtype",
        ),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**options)


def test_it_has_no_weights_before_they_are_pushed(monkeypatch):
    monkeypatch.setattr(colocated, "check_vllm", lambda: None)
    with pytest.raises(ValueError, match=r"Call `update_weights\(policy\)` first"):
        VLLMEngine().generate([ArithmeticTask().prompt({"problem": "1+2"})], 1, None, 0)


@pytest.mark.skipif(start.installed_version() is not None, reason="vLLM is installed here")
def test_a_run_without_vllm_ends_before_the_policy_is_loaded_with_what_to_install(capsys):
    line = fails(capsys, "fit", *SHORT, "--model.engine=VLLMEngine")
    assert f'needs vLLM, which is not installed. Install it: pip install "vllm>={start.FLOOR},<{start.CEILING}"' in line


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("0.31.9", False), ("0.32.0", True), ("0.32.1+cu129", True), ("0.33.0rc1", True), ("0.34.0.dev1", False)],
)
def test_releases_with_the_known_interface_are_accepted(version, accepted, monkeypatch):
    monkeypatch.setattr(start, "installed_version", lambda: Version(version))
    if accepted:
        VLLMEngine()
    else:
        with pytest.raises(ValueError, match=rf"needs vLLM from 0.32 to before 0.34, but got {version}"):
            VLLMEngine()


def test_the_extra_asks_for_the_same_releases():
    config = configparser.ConfigParser()
    config.read(Path(grail_lightning.__file__).parents[1] / "setup.cfg")
    (line,) = [line for line in config["options.extras_require"]["vllm"].splitlines() if line.startswith("vllm")]
    assert {str(part) for part in Requirement(line).specifier} == {f">={start.FLOOR}", f"<{start.CEILING}"}


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

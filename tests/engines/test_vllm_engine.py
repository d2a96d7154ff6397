"""What `VLLMEngine` refuses before it starts anything."""

import pytest

from grail_lightning.engines import VLLMEngine
from grail_lightning.engines.vllm import colocated
from grail_lightning.tasks import ArithmeticTask
from tests.shell import SHORT, fails


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


@pytest.mark.skipif(colocated.installed_version() is not None, reason="vLLM is installed here")
def test_a_run_without_vllm_ends_before_the_policy_is_loaded_with_what_to_install(capsys):
    line = fails(capsys, "fit", *SHORT, "--model.engine=VLLMEngine")
    assert 'needs vLLM, which is not installed. Install it: pip install "vllm>=' in line

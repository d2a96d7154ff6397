"""`VLLMEngine` with the CPU build of vLLM: `make test-vllm`. It starts once, for all tests of this file."""

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grail_lightning import HFEngine, Sampling, VLLMEngine
from grail_lightning.core.engines.base import TurnRequest
from grail_lightning.core.engines.vllm import colocated
from grail_lightning.core.engines.vllm.worker import report_whole_vocabulary
from grail_lightning.core.policy.load import load_policy
from tests.runs import problems

pytestmark = pytest.mark.vllm

PROMPTS = problems(4)
ROOT = Path(__file__).parents[2]
LIMIT = 64


class Counting(VLLMEngine):
    """Counts its pushes. A test may let something happen in vLLM right after one, behind the engine's back."""

    pushes, afterwards = 0, None

    def _push(self, policy):
        super()._push(policy)
        self.pushes += 1
        if self.afterwards is not None:
            self._llm.collective_rpc(self.afterwards)


@pytest.fixture(scope="module")
def started():
    """An engine that is running, with what the start may have left behind: threads, ranks, random numbers."""
    engine = Counting()
    before = random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state()
    settings = torch.set_num_threads, dict(os.environ)
    engine.update_weights(load_policy("arithmetic").eval())
    after = random.getstate(), np.random.get_state()[1].copy(), torch.random.get_rng_state()
    return engine, (before, after), (settings, (torch.set_num_threads, dict(os.environ)))


@pytest.fixture
def policy():
    return load_policy("arithmetic").eval()


@pytest.fixture
def engine(started, policy):
    engine = started[0]
    engine.afterwards = None
    engine.update_weights(policy)
    return engine


def _own(policy, sampling, group_size=4):
    engine = HFEngine()
    engine.update_weights(policy)
    return engine.generate(PROMPTS, group_size, sampling, seed=1)


def test_prompts_of_more_tokens_than_vllm_reads_at_once_are_sampled(engine, policy):
    long = [replace(p, messages=p.messages * 8) for p in problems(64)]
    assert sum(len(policy.encode(p.messages)) for p in long) > 4096
    drawn = Sampling(max_response_length=4)
    assert engine.generate(long, 2, drawn, seed=0).texts[:2] == engine.generate(long[:1], 2, drawn, seed=0).texts


@pytest.mark.parametrize("stop", [(), ("\n",), ("=1",), ("\\boxed",)])
def test_greedy_responses_are_those_of_the_own_engine(stop, engine, policy):
    sampling = Sampling(max_response_length=LIMIT, temperature=0.0, stop=stop)
    found, expected = engine.generate(PROMPTS, 2, sampling, seed=1), _own(policy, sampling, 2)
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.finished, expected.finished)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert (found.sampling_logprobs - expected.sampling_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.4, "top_p": 0.5}]
)
def test_log_probabilities_are_the_trainers_before_top_k_and_top_p(options, engine, policy):
    sampling = Sampling(max_response_length=LIMIT, **options)
    batch = engine.generate(PROMPTS, 8, sampling, seed=2)
    with torch.no_grad():
        trained = policy(policy.layout(batch), temperature=sampling.temperature)
    assert (trained - batch.sampling_logprobs).abs().max() < 1e-3
    assert len(set(batch.texts)) > len(PROMPTS)


def test_rollouts_are_a_function_of_the_seed_and_leave_the_random_state_alone(engine):
    sampling = Sampling(max_response_length=LIMIT)
    states = random.getstate(), torch.random.get_rng_state()
    one, same, other = (engine.generate(PROMPTS, 8, sampling, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.response_ids, same.response_ids)
    assert one.texts != other.texts
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.random.get_rng_state())


def test_starting_leaves_threads_ranks_and_random_numbers_as_they_were(started):
    _, (before, after), (settings, present) = started
    assert before[0] == after[0]
    assert np.array_equal(before[1], after[1])
    assert torch.equal(before[2], after[2])
    assert settings[0] is present[0]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LD_PRELOAD"):
        assert settings[1].get(name) == present[1].get(name), name


def test_weights_are_pushed_when_they_have_changed_and_not_otherwise(engine, policy):
    pushes = engine.pushes
    engine.update_weights(policy)
    engine.update_weights(load_policy("arithmetic").eval())
    assert engine.pushes == pushes, "the same weights, also of another policy"
    sampling = Sampling(max_response_length=LIMIT, temperature=0.0)
    before = engine.generate(PROMPTS, 1, sampling, seed=0)
    policy.blocks[1].mlp.down_proj.weight.data.mul_(1.5)  # Of which `_version` knows nothing.
    policy.model.get_input_embeddings().weight.data.mul_(1.05)  # The head is tied to it.
    engine.update_weights(policy)
    assert engine.pushes == pushes + 1
    after = engine.generate(PROMPTS, 1, sampling, seed=0)
    assert torch.equal(after.response_ids, _own(policy, sampling, 1).response_ids)
    assert after.texts != before.texts


def test_a_weight_that_was_changed_behind_its_back_stops_the_run(engine, policy):
    def spoil(worker):
        model = worker.model_runner.get_model()
        model.model.layers[2].input_layernorm.weight.data[5] *= 2

    engine.afterwards = spoil
    policy.model.get_input_embeddings().weight.data.mul_(1.01)
    with pytest.raises(ValueError, match=r"`Counting` and the trainer must agree .* after a push") as told:
        engine.update_weights(policy)
    mean, largest = map(float, re.search(r"differ by (\S+) on average and by up to (\S+) \(", str(told.value)).groups())
    assert 1e-4 < mean < largest
    engine.afterwards = None
    pushes = engine.pushes
    engine.update_weights(policy)
    assert engine.pushes == pushes + 1, "a push that failed its probe counts as none"


def test_the_stale_head_that_vllm_leaves_on_cpus_would_be_noticed(engine, policy, monkeypatch):
    def without_repacking(worker, weights):
        worker.reload_weights(weights_iterator=weights)

    monkeypatch.setattr(colocated, "take_weights", without_repacking)
    policy.model.get_input_embeddings().weight.data.mul_(1.05)
    with pytest.raises(ValueError, match="must agree"):
        engine.update_weights(policy)


def test_log_probabilities_after_top_k_would_be_noticed(engine, policy):
    def undo(worker):
        worker.model_runner.sampler.topk_topp_sampler = worker.model_runner.sampler.topk_topp_sampler.inner

    engine.afterwards = undo
    policy.model.get_input_embeddings().weight.data.mul_(1.01)
    try:
        with pytest.raises(ValueError, match="must agree"):
            engine.update_weights(policy)
    finally:
        engine._llm.collective_rpc(report_whole_vocabulary)


def test_it_samples_the_same_after_sleeping(engine, policy, monkeypatch):
    """On CPUs the worker keeps its memory; the scheduler pauses and goes on, and the weights are pushed again."""
    sampling = Sampling(max_response_length=LIMIT, temperature=0.0)
    monkeypatch.setattr(engine, "_sleeps", lambda device: True)
    awake = engine.generate(PROMPTS, 1, sampling, seed=0)
    engine.update_weights(policy.train())
    pushes = engine.pushes
    assert engine.generate(PROMPTS, 1, sampling, seed=0).texts == awake.texts
    assert engine._asleep
    engine.update_weights(policy)
    with engine.turns(sampling) as sampler:
        ids = policy.encode(PROMPTS[0].messages)
        (first,) = sampler([TurnRequest(0, PROMPTS[0], ids, 3, seed=0)])
        (second,) = sampler([TurnRequest(0, PROMPTS[0], ids + first.ids, LIMIT - 3, seed=0)])
    assert first.ids + second.ids == awake.response_ids[0, : awake.response_lengths[0]].tolist()
    assert engine._asleep
    engine.update_weights(policy)
    assert engine.pushes == pushes + 2, "they were given back, changed or not"
    assert not engine._asleep
    assert engine.generate(PROMPTS, 1, sampling, seed=0).texts == awake.texts
    engine.update_weights(policy.eval())
    assert engine.generate(PROMPTS, 1, sampling, seed=0).texts == awake.texts
    assert not engine._asleep, "the next batch of an evaluation has the same weights"


RUN = [
    *("--config=configs/quickstart.yaml", "--model.engine=VLLMEngine", "--trainer.enable_progress_bar=false"),
    *("--trainer.max_steps=4", "--data.num_val=32", "--data.prompts_per_batch=4", "--model.credit=Uniform"),
]


def _run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "grail_lightning", *arguments, f"--trainer.logger.init_args.save_dir={folder}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


RANKS = {
    "one rank": [],
    "sharded": ["--trainer.devices=2", "--trainer.strategy=ModelParallelStrategy"],
    "one copy": ["--trainer.devices=2", "--trainer.strategy=ddp", "--model.engine.tensor_parallel_size=2"],
}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_trains_evaluates_and_verifies_its_pushes(ranks, tmp_path):
    done = _run(tmp_path, "fit", *RUN, *RANKS[ranks])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vLLM samples in this process. Log-probabilities of sampler and trainer differ by" in done.stderr
    assert "held-out accuracy: " in done.stdout + done.stderr
    if ranks == "one rank":
        tested = _run(tmp_path, "test", *RUN, "--data.num_test=16", f"--model.policy={tmp_path}/quickstart/export")
        assert tested.returncode == 0, tested.stderr[-3000:]


def test_a_resumed_run_has_the_weights_of_one_that_did_not_stop(tmp_path):
    whole = _run(tmp_path / "whole", "fit", *RUN, "--trainer.val_check_interval=1000")
    parts = [
        _run(tmp_path / "parts", "fit", *RUN, "--trainer.val_check_interval=1000", *more)
        for more in (["--trainer.max_steps=2"], ["--trainer.max_steps=4", "--ckpt_path=last"])
    ]
    for done in (whole, *parts):
        assert done.returncode == 0, done.stderr[-3000:]
    one, other = (load_file(tmp_path / name / "quickstart/export/model.safetensors") for name in ("whole", "parts"))
    start = load_policy("arithmetic").model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(torch.equal(one[name], start[name]) for name in one if "proj" in name)


def test_prompts_and_responses_beyond_the_length_of_vllm_are_one_line(tmp_path):
    done = _run(tmp_path, "fit", *RUN, "--model.engine.max_model_len=48")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "are longer than 0 tokens, the smaller of" in line

"""One step ahead: what is sampled with which weights, and that a resumed run equals one that did not stop."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

from grail_lightning import ArithmeticData, HFEngine, LastCheckpoint, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.figures import tag
from tests.copying_engine import Elsewhere
from tests.processes import on_ranks
from tests.runs import Watch, module, trainer, weights
from tests.runs_on_ranks import ahead as ahead_on_ranks

METRICS = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
SHORTLY = Sampling(max_response_length=8)
AHEAD = {"sample_ahead": True, "sampler_cap": 2.0}
# The bonus gives every row a gradient.
OBJECTIVE = {"group_size": 2, "mini_batches": 2, "entropy_coefficient": 0.1, "mask_truncated": False}


def ahead(engine=None, **changes):
    """A module that samples one step ahead; two optimiser steps a batch."""
    return module(OBJECTIVE | AHEAD | changes, sampling=SHORTLY, engine=engine or Elsewhere())


def data():
    """Four batches an epoch."""
    return ArithmeticData(num_train=12, num_val=2, prompts_per_batch=3, eval_prompts_per_batch=2)


class Before(Watch):
    """Keeps the weights from before each batch, its prompts, and when it began."""

    def __init__(self):
        super().__init__()
        self.weights, self.prompts, self.begun = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights.append(weights(pl_module))
        self.prompts.append([prompt.messages for prompt in batch])
        self.begun.append(trainer.global_step)


def fit(folder, max_steps, path=None, **changes):
    """A run with `last.ckpt` in `folder`."""
    ours, watch = ahead(), Before()
    saver = LastCheckpoint(folder=str(folder), every_n_batches=1)
    run = trainer(max_steps, watch, saver, enable_checkpointing=True, **changes)
    run.fit(ours, data(), ckpt_path=path, weights_only=None if path is None else True)
    return watch, weights(ours)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run of six batches, four of which are an epoch."""
    return fit(tmp_path_factory.mktemp("whole"), 12)


def test_each_batch_is_sampled_with_the_weights_that_the_batch_before_began_with(uninterrupted):
    watch, _ = uninterrupted
    policy, engine = load_policy("arithmetic", trainable=False), HFEngine()
    engine.update_weights(policy)
    for k, output in enumerate(watch.outputs):
        policy.load_state_dict(watch.weights[max(k - 1, 0)], strict=False)  # The head is the embedding.
        prompts = output.batch.prompts[::2]
        assert [prompt.messages for prompt in prompts] == watch.prompts[k]
        expected = engine.generate(prompts, 2, SHORTLY, derive_seed(0, "train", watch.begun[k], 0, 0))
        assert torch.equal(output.batch.response_ids, expected.response_ids)
        assert torch.equal(output.batch.sampling_logprobs, expected.sampling_logprobs)
        assert all(f"`{tag(figure)}`" in METRICS for figure in output.metrics if "ahead" in figure or "stale" in figure)
    assert watch.begun == [0, 2, 4, 6, 8, 10]
    assert [output.metrics["sampling/staleness"] for output in watch.outputs] == [0, 2, 2, 2, 2, 2]
    assert ["time/sample_ahead" in output.metrics for output in watch.outputs] == [False] + [True] * 5
    assert not torch.equal(*(w["model.model.embed_tokens.weight"] for w in watch.weights[:2]))


def test_old_log_probabilities_are_the_trainers_and_the_correction_is_between_them_and_the_samplers():
    """The ratio of the first optimiser step is 1 although the sampler had other weights."""
    watch = Watch()
    trainer(8, watch, limit_val_batches=0).fit(
        module(
            OBJECTIVE | AHEAD | {"mini_batches": 1},
            sampling=SHORTLY,
            engine=Elsewhere(),
            optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        ),
        data(),
    )
    gaps = [output.metrics["sampling/sampling_logp_difference/mean"] for output in watch.outputs]
    assert gaps[0] < 1e-5
    assert all(gap > 1e-3 for gap in gaps[1:])
    assert all(output.metrics["clip_ratio/region_mean"] == 0 for output in watch.outputs)


def test_a_resumed_run_ends_with_the_weights_of_one_that_did_not_stop(uninterrupted, tmp_path):
    """From inside a batch (3), which is seen twice, and behind an epoch (8)."""
    watch, whole = uninterrupted
    path, seen = None, []
    for stop in (3, 8, 12):
        part, resumed = fit(tmp_path, stop, path)
        seen += [(o.batch.texts, o.metrics["sampling/staleness"]) for o in part.outputs]
        path = tmp_path / "last.ckpt"
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    assert seen[:1] + seen[2:] == [(o.batch.texts, o.metrics["sampling/staleness"]) for o in watch.outputs]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_resume_with_the_batch_in_flight_of_both(strategy, tmp_path):
    """Three and two prompts of each batch."""
    reports = on_ranks(ahead_on_ranks, 2, strategy, tmp_path)
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        for figure in ("weights", "texts"):
            whole, resumed = report[figure]
            assert whole == resumed
    assert reports[0]["weights"] == reports[1]["weights"]
    assert reports[0]["texts"] != reports[1]["texts"]
    if strategy == "ddp":  # One process samples anew what two had in flight.
        watch, five = Watch(), ArithmeticData(num_train=20, num_val=2, prompts_per_batch=5)
        alone = trainer(3, watch, limit_val_batches=0)
        with pytest.warns(UserWarning, match="the number of ranks are not the checkpoint's"):
            alone.fit(ahead(mini_batches=1), five, ckpt_path=tmp_path / "begun" / "last.ckpt", weights_only=True)
        assert [output.metrics["sampling/staleness"] for output in watch.outputs] == [0]


def test_validation_has_the_present_weights_and_changes_nothing(uninterrupted, tmp_path):
    without, _ = uninterrupted
    _, found = fit(tmp_path, 4, val_check_interval=1)
    assert all(torch.equal(weight, found[name]) for name, weight in without.weights[2].items())


def test_a_batch_in_flight_is_dropped_if_the_resumed_run_has_other_sampling(tmp_path):
    """Other prompts are told in the same way: `test_a_batch_in_flight_is_restored_with_its_turns`."""
    fit(tmp_path, 2)
    ours, watch = ahead(), Before()
    ours.sampling = Sampling(max_response_length=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(6, watch).fit(ours, data(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert len([w for w in caught if "sampled ahead is sampled anew" in str(w.message)]) == 1
    assert [output.metrics["sampling/staleness"] for output in watch.outputs] == [0, 2]
    for output, prompts in zip(watch.outputs, watch.prompts, strict=True):
        assert [prompt.messages for prompt in output.batch.prompts[::2]] == prompts


class Third(Elsewhere):
    """Does something else when it samples for the third time."""

    def __init__(self, instead):
        super().__init__()
        self.instead, self.calls, self.threads = instead, 0, []

    def generate(self, *arguments):
        self.calls += 1
        self.threads.append(threading.current_thread().name)
        if self.calls == 3:
            self.instead()
        return super().generate(*arguments)


def test_an_error_of_the_thread_reaches_the_trainer_as_it_is():
    error = ConnectionError("the server is gone")

    def fail():
        raise error

    engine = Third(fail)
    with pytest.raises(ConnectionError, match="the server is gone") as caught:
        trainer(12, limit_val_batches=0).fit(ahead(engine), data())
    assert caught.value is error
    assert caught.traceback[-1].name == "fail"
    assert engine.threads == ["MainThread", "sample-ahead", "sample-ahead"]


@pytest.mark.slow
def test_an_interrupt_ends_the_process_and_what_is_in_flight(tmp_path):
    """While the main thread waits for a batch that would take two minutes."""
    begun = time.monotonic()
    program = [sys.executable, __file__]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=150, env=os.environ, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert "terminate called" not in ended.stderr
    # The interrupt comes while the third batch is awaited; a slow machine is still at its second.
    assert re.fullmatch(r"Interrupted at step [234], before its first checkpoint\.", ended.stderr.splitlines()[-1])
    assert time.monotonic() - begun < 100


class Pooled(Third):
    """Its third sampling takes two minutes, in the thread of a pool, as requests to a server do."""

    def __init__(self):
        super().__init__(self.wait)
        self.cancelled = threading.Event()

    def wait(self):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.cancelled.wait, 120)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            waiting.result()

    def cancel(self):
        self.cancelled.set()


if __name__ == "__main__":
    saver = LastCheckpoint()
    trainer(12, saver, limit_val_batches=0, enable_checkpointing=True).fit(ahead(Pooled()), data())

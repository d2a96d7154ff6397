"""Options that make a run fit."""

from dataclasses import replace

import pytest

from grail_lightning.plan.advice import advise
from grail_lightning.policy import Loading, LoRA
from tests.plan.plans import planner, settings

MIB = 2**20


def _options(limit, ranks=1, **changes):
    found = advise(planner(), settings(**changes), ranks, limit)
    assert found.fits == (found.capacity.peak.total <= limit)
    return [str(change) for change in found.changes], found


def test_a_run_that_fits_needs_no_options():
    assert _options(10**12)[0] == []


def test_the_cache_is_what_helps_where_sampling_is_the_peak():
    large = {"prompts_per_batch": 256, "execution": replace(settings().execution, token_budget=128)}
    before = planner().plan(settings(**large), 1)
    assert before.peak.name == "sampling"
    options, found = _options(before.phases["update"].total + 4 * MIB, **large)
    assert found.fits
    assert [option.rpartition("=")[0] for option in options] == ["--model.engine=HFEngine --model.engine.cache_tokens"]


def test_micro_batches_and_checkpointing_help_where_the_update_is_the_peak():
    chosen = {
        "execution": replace(settings().execution, token_budget=4096),
        "prompts_per_batch": 32,
        "cache_tokens": 64,
    }
    before = planner().plan(settings(**chosen), 1)
    assert before.peak.name == "update"
    options, found = _options(before.peak.total / 2, **chosen)
    assert found.fits
    assert len(options) == 1, "one of them is enough"
    assert options[0] in ("--model.execution.token_budget=2048", "--model.loading.gradient_checkpointing=true")


def test_options_that_change_training_come_last():
    checkpointed = {"loading": Loading(gradient_checkpointing=True, chunk_tokens=128), "cache_tokens": 64}
    small = {"execution": replace(settings().execution, token_budget=64), **checkpointed}
    state = planner().plan(settings(**small), 1)
    options, found = _options(0.7 * state.peak.total, **small)
    assert found.fits
    assert options == ["--model.optimizer=torchao.optim.AdamW8bit"]
    options, found = _options(0.5 * state.peak.total, **small)
    assert "--model.loading.lora.rank=16" in options


def test_sharding_helps_several_devices():
    small = {"execution": replace(settings().execution, token_budget=64), "cache_tokens": 64}
    whole = planner().plan(settings(**small, strategy="ddp"), 4)
    options, found = _options(0.6 * whole.peak.total, 4, **small, strategy="ddp")
    assert "--trainer.strategy=ModelParallelStrategy" in options
    assert found.capacity.strategy == "fsdp2"


def test_the_advice_can_be_that_nothing_helps():
    options, found = _options(1, loading=Loading(lora=LoRA()))
    assert not found.fits
    assert "--model.loading.gradient_checkpointing=true" in options


@pytest.mark.parametrize("limit", [0.5, 0.8])
def test_no_option_is_needless(limit):
    chosen = {"execution": replace(settings().execution, token_budget=4096), "prompts_per_batch": 64}
    made = planner()
    before = made.plan(settings(**chosen), 1).peak.total
    found = advise(made, settings(**chosen), 1, limit * before)
    assert found.fits
    for left_out in found.changes:
        others = settings(**chosen)
        for change in found.changes:
            others = others if change is left_out else change.apply(others)
        assert made.plan(others, 1).peak.total > limit * before

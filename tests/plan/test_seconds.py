"""Seconds of each phase, by hand."""

from dataclasses import replace

import pytest

from grail_lightning.plan.memory import Placement
from grail_lightning.plan.seconds import (
    PRESETS,
    Rates,
    Work,
    credit_seconds,
    forward_flops,
    read_rates,
    sampling_seconds,
    update_seconds,
)
from tests.plan.test_memory import ALONE, SHAPES

# 10¹² operations a second in half precision, 10⁹ bytes of memory and between ranks, and nothing to start a kernel.
RATES = Rates(tflops=1, tflops_full=0.5, memory=1, link=1, block_ms=0)
WORK = Work(
    rows=4,
    prompts=2,
    prompt=10,
    response=6,
    longest=8,
    calls=1,
    passes=2,
    micro_batches=3,
    cached_token=16,
    checkpointed=False,
    half=True,
    shared=False,
)


def test_the_operations_of_a_forward_pass():
    # 700 of the 900 weights are in the blocks, 200 in the head. 4 rows of 16 tokens; 4 blocks, 8 columns of heads.
    blocks, head = forward_flops(SHAPES, WORK, 4)
    pairs = 4 * (10 * 10 / 2 + 6 * (10 + 3))
    assert blocks == 2 * 700 * 64 + 4 * 4 * 8 * pairs
    assert head == 2 * 200 * 24
    # Prompts that are run once: 2 of 10 tokens instead of 4.
    shared, _ = forward_flops(SHAPES, replace(WORK, shared=True), 4)
    assert shared == 2 * 700 * (20 + 24) + 4 * 4 * 8 * (2 * 50 + 4 * 6 * 13)


def test_sampling_reads_all_weights_at_each_step():
    # 8 steps of 4,000 bytes; 24 tokens read 16 bytes of 13 tokens before them, on average.
    read = 8 * 4000 + 24 * 13 * 16
    assert sampling_seconds(SHAPES, ALONE, WORK, RATES) == pytest.approx(read / 1e9)
    cast = replace(ALONE, autocast=True)
    assert sampling_seconds(SHAPES, cast, WORK, RATES) == pytest.approx((8 * 1800 + 24 * 13 * 16) / 1e9)
    slow = replace(RATES, block_ms=2.0)
    started = sampling_seconds(SHAPES, ALONE, replace(WORK, calls=3), slow)
    assert started == pytest.approx(3 * 8 * 4 * 2e-3 + (3 * 8 * 4000 + 24 * 13 * 16) / 1e9)


def test_an_update_is_three_passes_and_four_of_the_head():
    blocks, head = forward_flops(SHAPES, WORK, 4)
    stepped = 8 * 4000 / 1e9
    assert update_seconds(SHAPES, ALONE, WORK, RATES) == pytest.approx(2 * ((4 * head + 3 * blocks) / 1e12 + stepped))
    again = update_seconds(SHAPES, ALONE, replace(WORK, checkpointed=True), RATES)
    assert again == pytest.approx(2 * ((4 * head + 4 * blocks) / 1e12 + stepped))
    full = update_seconds(SHAPES, ALONE, replace(WORK, half=False), RATES)
    assert full == pytest.approx(2 * ((4 * head + 3 * blocks) / 5e11 + stepped))


def test_ranks_exchange_gradients_and_sharded_weights():
    alone = update_seconds(SHAPES, ALONE, WORK, RATES)
    ddp = update_seconds(SHAPES, Placement(strategy="ddp", ranks=4), WORK, RATES)
    assert ddp - alone == pytest.approx(2 * 2 * 4000 * 3 / 4 / 1e9)
    sharded = Placement(strategy="fsdp2", ranks=4)
    # Weights are gathered twice and gradients reduced once in each of three micro-batches; a quarter is stepped.
    moved = 2 * (3 * 2 + 3) * 4000 * 3 / 4 / 1e9
    fewer = 2 * 8 * 3000 / 1e9
    assert update_seconds(SHAPES, sharded, WORK, RATES) - alone == pytest.approx(moved - fewer)
    once = update_seconds(SHAPES, replace(sharded, reduce_once=True), WORK, RATES)
    assert once - alone == pytest.approx(2 * (3 * 2 + 1) * 4000 * 3 / 4 / 1e9 - fewer)


def test_credit_scores_a_share_of_the_rows():
    blocks, _ = forward_flops(SHAPES, WORK, 2)
    work = replace(WORK, forwards=1, backwards=1, scored=0.5)
    assert credit_seconds(SHAPES, ALONE, work, RATES) == pytest.approx(2 * blocks / 1e12)
    assert credit_seconds(SHAPES, ALONE, WORK, RATES) == 0


def test_rates_are_presets_with_changes():
    assert read_rates(["a100"], "cuda") == PRESETS["a100"]
    assert read_rates([], "cuda") == PRESETS["h100"]
    assert read_rates(["tflops=7", "h200"], "cuda") == replace(PRESETS["h200"], tflops=7)


def test_rates_can_be_measured_here():
    found = read_rates(["measured", "link=3"], "cpu")
    assert found.link == 3
    assert 1e-3 < found.tflops_full < 100
    assert 0.1 < found.memory < 10_000
    assert 0 < found.block_ms < 1000


@pytest.mark.parametrize("given", ["b200", "tflops", "tflops=fast", "speed=3", "=", "tflops=0", "memory=-1"])
def test_wrong_rates_are_one_line(given):
    with pytest.raises(ValueError, match="`--rates`") as error:
        read_rates([given], "cuda")
    assert "\n" not in str(error.value)

"""Memory of each phase, by hand."""

from dataclasses import replace

import pytest

from grail_lightning.plan.head import Head
from grail_lightning.plan.memory import Placement, credit, gradients, kept, sampling, step, update
from grail_lightning.plan.shapes import Shapes
from grail_lightning.plan.trace import Activations, DecodingBytes
from grail_lightning.policy import Loading
from tests.plan.plans import planner, settings

# 1,000 parameters in float32: 4 blocks of 200, and 200 outside of them.
SHAPES = Shapes(
    parameters=1000,
    trainable=1000,
    weight_bytes=4000,
    trainable_bytes=4000,
    half=0,
    largest=100,
    linear=900,
    blocks=4,
    block_bytes=800,
    vocabulary=20,
    hidden=10,
    head_element=4,
    tied=True,
    head_trained=True,
    heads=8,
    sdpa=True,
)
ALONE, DDP, FSDP2 = (
    Placement(strategy="single"),
    Placement(strategy="ddp", ranks=4),
    Placement(strategy="fsdp2", ranks=4),
)
HALF = replace(SHAPES, weight_bytes=2000, trainable_bytes=2000, half=1000, block_bytes=400, head_element=2)


def _kept(shapes, placement, state, *, reference=False):
    return kept(shapes, placement, state, reference=reference, rollout_tokens=0)


def test_what_is_kept_by_strategy():
    assert _kept(SHAPES, ALONE, 8000) == {"weights": 4000, "optimizer state": 8000}
    assert _kept(SHAPES, DDP, 8000) == {"weights": 4000, "optimizer state": 8000, "DDP's buckets": 4000}
    assert _kept(SHAPES, FSDP2, 8000) == {"weights": 1000, "optimizer state": 2000}
    assert _kept(SHAPES, replace(FSDP2, ranks=1), 8000) == _kept(SHAPES, ALONE, 8000), "one rank has it all"
    assert _kept(SHAPES, ALONE, 0, reference=True) == {"weights": 4000, "reference": 4000}
    assert _kept(SHAPES, FSDP2, 0, reference=True) == {"weights": 1000, "reference": 1000}
    assert kept(SHAPES, ALONE, 0, reference=False, rollout_tokens=10)["rollouts"] == 480
    trained = {"reference": False, "rollout_tokens": 0, "second": True}
    assert kept(SHAPES, ALONE, 8000, **trained)["second model"] == 4000 + 8000
    assert kept(SHAPES, FSDP2, 8000, **trained)["second model"] == 1000 + 2000


def test_master_weights_take_18_bytes_a_parameter_with_adamw():
    """As the README says: 2 + 4 of weights, 4 of gradients and 8 of moments; in float32 16."""
    masters = replace(ALONE, masters=True)
    assert sum(_kept(HALF, masters, 8000).values()) + gradients(HALF, masters)["gradients"] == 18_000
    assert sum(_kept(SHAPES, ALONE, 8000).values()) + gradients(SHAPES, ALONE)["gradients"] == 16_000
    assert "master weights" not in _kept(HALF, replace(FSDP2, masters=True), 0), "sharded weights have none"


def test_sharded_gradients():
    # Outside of the blocks 800 bytes and three blocks are whole: 3,200 bytes, and as many of gradients.
    assert gradients(SHAPES, FSDP2) == {"gradients": 1000, "whole blocks": 6400}
    assert gradients(SHAPES, replace(FSDP2, reduce_once=True))["gradients"] == 4000
    frozen = replace(SHAPES, trainable=10, trainable_bytes=40)
    assert gradients(frozen, FSDP2) == {"gradients": 10, "whole blocks": 3200 + 32}


def test_sampling():
    decoding = DecodingBytes(cached_token=16, prompts=70, step=50)
    alone = sampling({"weights": 4000}, SHAPES, ALONE, decoding, rows=3, width=100)
    # 3 · 100 tokens of 16 bytes, and one of the four layers once more while it grows.
    assert alone.parts == {"weights": 4000, "KV cache": 4800 + 1200, "decoding": 70}
    sharded = sampling({}, SHAPES, replace(FSDP2, autocast=True), decoding, rows=3, width=100)
    assert sharded.parts == {"gathered weights": 4000, "cast weights": 1800, "KV cache": 6000, "decoding": 70}
    assert alone.total == 10_070


def test_credit_gathers_sharded_weights():
    assert credit({}, SHAPES, ALONE, 5).parts == {"activations": 5}
    assert credit({}, SHAPES, FSDP2, 5).parts == {"gathered weights": 4000, "activations": 5}


def _update(activations, head, **changes):
    sizes = {"tokens": 6, "logits": 2000, "sparse_embeddings": False}
    return update({}, SHAPES, ALONE, activations, head, **sizes | changes).parts


def test_an_update_is_the_largest_of_three_moments():
    head = Head(vocabulary=20, hidden=10, weight=4, compute=4, state=4, tied=True)
    # In the blocks the gradient of the head (20 · 10 · 4 bytes) waits. At the embeddings there is one more of it.
    first = _update(Activations(held=1000, peak=1500, state=4), head)
    assert (first["activations"], first["logits"]) == (1000, 2000)
    blocks = _update(Activations(held=0, peak=9000, state=4), head)
    assert (blocks["activations"], blocks["head's gradient"]) == (9000, 800)
    many = _update(Activations(held=0, peak=0, state=4), head, tokens=100, logits=0)
    assert many == {"gradients": 4000, "activations": 4000, "embeddings' gradient": 800 + 4000 + 800}


def test_the_optimizers_step_has_no_activations():
    assert step({"weights": 1}, SHAPES, ALONE, 7).parts == {"weights": 1, "gradients": 4000, "workspace": 7}
    assert step({}, SHAPES, FSDP2, 0).parts == {"gradients": 1000}


def _peaks(ranks=1, **changes):
    return {name: phase.total for name, phase in planner().plan(settings(**changes), ranks).phases.items()}


def test_each_option_saves_what_it_is_for():
    base = _peaks()
    assert _peaks(cache_tokens=300)["sampling"] < base["sampling"]
    assert _peaks(execution=replace(settings().execution, token_budget=128))["update"] < base["update"]
    assert _peaks(loading=Loading(gradient_checkpointing=True))["update"] < base["update"]
    assert _peaks(4, strategy="fsdp2")["optimizer step"] < _peaks(4, strategy="ddp")["optimizer step"]
    whole = _peaks(4, strategy="fsdp2", loading=Loading(reduce_once=True))
    assert whole["update"] > _peaks(4, strategy="fsdp2")["update"]
    assert "sampling" not in _peaks(cache_tokens=None), "another engine is not planned"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_more_ranks_never_need_more(strategy):
    found = [max(_peaks(ranks, strategy=strategy).values()) for ranks in (2, 4)]
    assert found[1] <= found[0]

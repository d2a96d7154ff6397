"""Compiled decoder blocks do what eager ones do, and nothing else notices."""

import copy
import shutil
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache

from grail_lightning.credit import input_saliency
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Loading, LoRA, check_policy, load_policy
from grail_lightning.policy.compiled import CompiledForward
from grail_lightning.policy.sharding import gathered, shard
from grail_lightning.rollout import Sampling
from tests.draws import without_ties
from tests.runs import beside_the_update, one_in_four, problems
from tests.tolerance import assert_near, roundings

SAMPLING = Sampling(max_response_length=40)
# Dynamo looks at `.grad` of its inputs, and hides the warning by a way that an error does not take.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
WITHOUT_COMPILER = shutil.which("g++") is None


@pytest.fixture
def traced(monkeypatch):
    """Dynamo and AOT autograd without Inductor's C++, which takes a minute."""
    dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(scope="module")
def batch():
    """16 rollouts of uneven lengths."""
    return one_in_four(4, SAMPLING)


def _policy(**options):
    policy = load_policy("arithmetic", Loading(**options)).train()
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def _pair(**options):
    return _policy(**options), _policy(compile=True, **options)


def _graphs():
    return dynamo.utils.counters["stats"]["unique_graphs"]


def _passes(policy, batch):
    """Log-probabilities, the gradients of their sum, and saliency at the embeddings and at a block."""
    stats = policy(batch.input_ids, batch.attention_mask, batch.response_mask, with_entropy=True)
    stats.logprobs.sum().backward()
    found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    found |= {"logprobs": stats.logprobs.detach(), "entropy": stats.entropy.detach()}
    for leaf in ("embeddings", "middle"):
        found[leaf] = input_saliency(policy, batch, batch.answer.content, leaf=leaf)
    return found


def _gap(found, expected):
    """The largest difference of a tensor as a share of its largest entry, which must not be 0."""
    assert found.keys() == expected.keys()
    assert all(value.abs().max() > 0 for value in expected.values())
    return max(((found[name] - value).abs().max() / value.abs().max()).item() for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"lora": LoRA(rank=2)}, {"gradient_checkpointing": True}, {"packing": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_forward_gradients_and_saliency_are_those_of_eager_blocks(options, batch, traced):
    plain, compiled = _pair(**options)
    before = _graphs()
    assert _gap(_passes(compiled, batch), _passes(plain, batch)) <= roundings(1000, torch.float32)
    assert _graphs() > before


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_COMPILER, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # Inductor imports what torch has deprecated.
def test_generated_code_gives_what_eager_blocks_give(batch):
    dynamo.reset()
    plain, compiled = _pair()
    assert _gap(_passes(compiled, batch), _passes(plain, batch)) <= roundings(1000, torch.float32)


@pytest.mark.slow
def test_one_graph_serves_all_blocks_and_all_lengths(traced):
    policy, before = _policy(compile=True), _graphs()
    for rows, width in ((4, 40), (7, 33), (2, 17), (16, 50)):
        ids, mask = torch.randint(3, 400, (rows, width)), torch.ones(rows, width, dtype=torch.bool)
        mask[0, :3] = False
        policy(ids, mask, mask[:, 8:]).logprobs.sum().backward()
        assert _graphs() == before + 1


@pytest.mark.parametrize("width", [0, 3])
def test_decoding_is_compiled_with_few_graphs_for_all_blocks_and_samples_the_same(width, traced):
    """With prompts of one width, and with padded ones."""
    prompts = [p for p in problems(12) if not width or len(p.messages) % width == 0][:3]
    found = []
    for policy in _pair():
        engine, before = HFEngine(), _graphs()
        engine.update_weights(policy.eval())
        with without_ties():
            batch = engine.generate(prompts, 4, SAMPLING, seed=0)
        found.append((batch.texts, batch.sampling_logprobs, _graphs() - before))
    (texts, logprobs, none), (ours, also, made) = found
    assert ours == texts
    assert_near(also, logprobs, 100, torch.float32)
    assert none == 0
    assert (
        1 <= made <= 3
    )  # A graph that is first met with one length is made anew for all; a batch of one row is a third.


@pytest.mark.slow
def test_a_cache_that_cannot_be_traced_is_left_to_the_block_itself(traced):
    plain, compiled = _pair()
    ids, before = torch.arange(3, 33).reshape(2, 15), _graphs()
    found = []
    for policy in (plain, compiled):
        cache = DynamicCache()
        with torch.no_grad():
            policy.model(ids[:, :10], past_key_values=cache, use_cache=True)
            found.append(policy.model(ids[:, 10:], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(found[1], found[0])
    assert _graphs() == before


@pytest.mark.slow
@pytest.mark.parametrize("leaf", ["embeddings", "middle"])
def test_credit_beside_the_update_runs_backward_twice_through_a_compiled_graph(leaf, batch, traced):
    found = []
    for policy in _pair():
        grads, weights = beside_the_update(policy, batch, leaf, SAMPLING, token_budget=8192)
        found.append(grads | {"scores": weights.scores})
    assert _gap(found[1], found[0]) <= roundings(1000, torch.float32)


def test_hooks_that_come_and_go_are_called(batch, traced):
    (plain, compiled), calls, before = _pair(), [], _graphs()
    rows = (batch.input_ids, batch.attention_mask, batch.response_mask)
    found = compiled(*rows).logprobs
    hook = compiled.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    compiled(*rows)
    hook.remove()
    compiled(*rows)
    assert calls == [1]
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert _graphs() == before + 1
    assert_near(found, plain(*rows).logprobs, 100, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_names_copies_and_exports_are_those_of_eager_blocks(lora, batch, tmp_path, traced):
    plain, compiled = _pair(lora=lora)
    run = (batch.input_ids, batch.attention_mask, batch.response_mask)
    expected = compiled(*run).logprobs.detach()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    twin = copy.deepcopy(compiled)
    assert all(block.forward.block is block for block in twin.blocks)
    with torch.no_grad():
        for parameter in twin.blocks.parameters():
            parameter.zero_()
        assert (twin(*run).logprobs - expected).abs().max() > 0.1
    compiled.save(tmp_path)
    again = load_policy(str(tmp_path))
    assert_near(again(*run).logprobs, expected, 100, torch.float32)


@pytest.mark.slow
def test_sharded_blocks_are_compiled_too(batch, tmp_path, traced):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        plain, compiled = _pair()
        shard(compiled, init_device_mesh("cpu", (1,)))
        before = _graphs()
        stats = compiled(batch.input_ids, batch.attention_mask, batch.response_mask)
        stats.logprobs.sum().backward()
        expected = plain(batch.input_ids, batch.attention_mask, batch.response_mask)
        expected.logprobs.sum().backward()
        assert _graphs() > before
        assert_near(stats.logprobs, expected.logprobs, 100, torch.float32)
        assert list(compiled.state_dict()) == list(plain.state_dict())
        theirs = dict(plain.named_parameters())
        for name, parameter in compiled.named_parameters():
            grad, other = parameter.grad.full_tensor(), theirs[name].grad
            assert (grad - other).abs().max() <= roundings(1000, torch.float32, other.abs().max()), name
        with gathered(compiled):
            found = input_saliency(compiled, batch, batch.answer.content, leaf="middle")
        wanted = input_saliency(plain, batch, batch.answer.content, leaf="middle")
        assert_near(found, wanted, 100, torch.float32)
    finally:
        torch.distributed.destroy_process_group()


def test_a_frozen_reference_is_compiled_and_stays_frozen(batch, traced):
    reference = load_policy("arithmetic", Loading(compile=True), trainable=False)
    assert isinstance(reference.blocks[0].forward, CompiledForward)
    assert not reference(batch.input_ids, batch.attention_mask, batch.response_mask).logprobs.requires_grad


def test_no_compiler_is_an_error_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"`loading.compile` needs a C\+\+ compiler, but found none"):
        check_policy("arithmetic", Loading(compile=True))
    check_policy("arithmetic", Loading())

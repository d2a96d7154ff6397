"""What only a GPU shows. `pytest -m gpu` runs these tests on CUDA, `GRAIL_TEST_DEVICE=cpu` those that can on a CPU.

Kernels of a GPU add in another order, so results are compared with float64 on the CPU, or bit for bit with themselves.
"""

import importlib.util
import os
import warnings

import pytest
import torch

from grail_lightning import HFEngine, Loading, Sampling
from grail_lightning.core.functional.tokens import HeadGradient, token_stats
from grail_lightning.core.policy.layout import packed_layout, padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import GRAIL, input_saliency
from tests import runs
from tests.steps import gap, steps

pytestmark = pytest.mark.gpu

DEVICE = torch.device(os.environ.get("GRAIL_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="there is no such kernel on a CPU")
needs_flash, needs_flash_3 = (
    pytest.mark.skipif(not ON_CUDA or importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("flash_attn", "flash_attn_interface")
)
ERRORS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""The largest relative error of gradients against float64."""


@pytest.fixture(scope="module")
def rollouts():
    """Eight rollouts of the packaged policy in two groups, located and with advantages, on the CPU."""
    return runs.one_in_four(2, runs.SAMPLING)


def on_device(weights=torch.float32, **loading):
    """The packaged policy on the device, with weights of a dtype."""
    return load_policy("arithmetic", Loading(**loading)).to(DEVICE, weights).train()


def exact(rollouts, **options):
    """Gradients of the first optimiser step in float64 on the CPU, of whole rows."""
    (found, _), *_ = steps(load_policy("arithmetic").double(), rollouts, False, token_budget=4000, **options)[0]
    return found


def error_of(policy, rollouts, share, expected, **options):
    """The relative error of the gradients of the first optimiser step."""
    (found, _), *_ = steps(policy, rollouts.to(DEVICE), share, token_budget=4000, **options)[0]
    return gap({name: g.double().cpu() for name, g in found.items()}, expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_cuda)], ids=["as they are", "compiled"])
@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("dtype", ERRORS)
def test_gradients_are_those_of_float64(dtype, share, compiled, rollouts):
    policy = on_device(dtype, compile=compiled)
    assert error_of(policy, rollouts, share, exact(rollouts)) < ERRORS[dtype]
    assert (policy.compiled_blocks is not None) == compiled


@needs_cuda
@pytest.mark.parametrize("dtype", ERRORS)
def test_all_kernels_of_prefix_trees_have_these_gradients(dtype, rollouts):
    expected = exact(rollouts)
    kernels = ("sdpa",) if dtype == torch.float32 else ("varlen", "sdpa")
    for kernel in kernels:
        policy = on_device(dtype)
        assert policy.tree_kernel == kernels[0]
        policy.tree_kernel = kernel
        assert error_of(policy, rollouts, True, expected) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ERRORS)
def test_saliency_beside_the_update_is_that_of_float64(dtype, rollouts):
    mask = rollouts.answer.whole
    expected = input_saliency(load_policy("arithmetic").double(), rollouts, mask)
    found = input_saliency(on_device(dtype), rollouts.to(DEVICE), mask.to(DEVICE)).double().cpu()
    assert ((found - expected).norm() / expected.norm()) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ERRORS)
def test_an_update_whose_forward_pass_gives_saliency_too_has_the_gradients_of_float64(dtype, rollouts):
    """A plain update comes first: what torch compiles for one backward pass must serve two of one graph as well."""
    fused = "embeddings", runs.SAMPLING, 4000
    expected, _ = runs.beside_the_update(load_policy("arithmetic").double().train(), rollouts, *fused)
    policy = on_device(dtype)
    assert error_of(policy, rollouts, True, exact(rollouts)) < ERRORS[dtype]
    policy.zero_grad()
    found, _ = runs.beside_the_update(policy, rollouts.to(DEVICE), *fused)
    assert gap({name: g.double().cpu() for name, g in found.items()}, expected) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ERRORS)
def test_the_head_of_a_large_vocabulary_has_the_gradients_of_float64(dtype):
    """On CUDA its passes over the logits are compiled."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, 32, generator=generator), 0.3 * torch.randn(20_000, 32, generator=generator)
    ids = torch.randint(len(weight), (70,), generator=generator)

    def differentiate(device, dtype):
        states, own = (tensor.to(device, dtype, copy=True).requires_grad_() for tensor in (hidden, weight))
        gradient = HeadGradient([own], own)
        options = {"temperature": 0.7, "chunk_tokens": 32, "head_gradient": gradient}
        stats = token_stats(states, lambda h: h @ own.T, ids.to(device), **options)
        stats.logprobs.square().sum().backward()
        return [t.detach().double().cpu() for t in (stats.logprobs, stats.entropy, states.grad, own.grad)]

    # What the weights lose by rounding is no error of the kernel.
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    for found, exact in zip(differentiate(DEVICE, dtype), differentiate("cpu", torch.float64), strict=True):
        assert (found - exact).norm() / exact.norm() < ERRORS[dtype]


@pytest.mark.parametrize("compiles", [False, "inductor" if ON_CUDA else "eager"], ids=["", "compiled"])
@pytest.mark.parametrize("method", ["compact", "static"])
def test_log_probabilities_of_sampled_tokens_are_those_of_training(method, compiles):
    """The static cache is decoded by CUDA graphs. A warning tells where it, or compiling, does not work."""
    policy = on_device().eval()
    engine = HFEngine(method=method, compile=compiles)
    engine.update_weights(policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`HFEngine`")
        batch = engine.generate(runs.problems(8), 4, Sampling(max_response_length=48), seed=0)
    with torch.no_grad():
        found = policy(padded_layout(batch.input_ids, batch.attention_mask, batch.response_mask))
    torch.testing.assert_close(found, batch.sampling_logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "attention",
    [
        "sdpa",
        pytest.param("flash_attention_2", marks=needs_flash),
        pytest.param("flash_attention_3", marks=needs_flash_3),
    ],
)
def test_packed_rows_have_the_log_probabilities_of_padded_rows(attention, rollouts):
    batch = rollouts.to(DEVICE)
    tensors = batch.input_ids, batch.attention_mask, batch.response_mask
    packed = on_device(torch.bfloat16, dtype="bfloat16", attention=attention, packing=True)
    with torch.no_grad():
        found = packed(packed_layout(*tensors, flash=attention != "sdpa"))
        expected = on_device(torch.bfloat16)(padded_layout(*tensors))
    assert (found - expected).norm() / expected.norm() < 0.05


def fitted(max_steps=4, **changes):
    """Weights after some steps of the real module on the device."""
    module = runs.module(**{"credit": GRAIL()} | changes.pop("module", {}))
    accelerator = {"accelerator": "gpu" if ON_CUDA else "cpu"}
    runs.trainer(max_steps, **accelerator, **changes).fit(module, runs.batches(4))
    return {name: weight.detach().double().cpu() for name, weight in module.policy.named_parameters()}


def difference(ours, theirs):
    """The largest difference of weights, in units of the learning rate (1e-4)."""
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours) / 1e-4


def test_a_deterministic_run_repeats_bit_for_bit():
    try:
        first, second = (fitted(deterministic=True) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)  # Lightning leaves it on.
    assert difference(first, second) == 0


def test_weights_in_bfloat16_with_masters_follow_those_in_float32():
    moved = fitted(max_steps=2)
    half = fitted(max_steps=2, precision="bf16-true", module={"loading": Loading(dtype="bfloat16")})
    assert all(torch.isfinite(weight).all() for weight in half.values())
    gaps = [((half[n] - moved[n]).norm() / moved[n].norm()).item() for n in moved if moved[n].norm() > 0]
    assert max(gaps) < 0.01  # Roundings of bfloat16, 2^-9, and steps of 2e-4.


def test_mixed_precision_moves_the_weights_as_float32_does():
    """AdamW's first steps have the length of the learning rate, so nearly all weights move alike."""
    moved, mixed = fitted(max_steps=1), fitted(max_steps=1, precision="bf16-mixed")
    start = {name: weight.double() for name, weight in load_policy("arithmetic").named_parameters()}
    same = [((moved[n] - start[n]).sign() == (mixed[n] - start[n]).sign()).double().mean().item() for n in start]
    assert sum(same) / len(same) > 0.9


def test_sharded_weights_on_one_rank_take_the_steps_of_whole_ones():
    from lightning.pytorch.strategies import ModelParallelStrategy

    whole = fitted(max_steps=2)
    module = runs.module(credit=GRAIL())
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    runs.trainer(2, accelerator="gpu" if ON_CUDA else "cpu", strategy=strategy).fit(module, runs.batches(4))
    sharded = {name: weight.full_tensor().double().cpu() for name, weight in module.policy.named_parameters()}
    assert difference(whole, sharded) < 4  # Gradients near zero may have the other sign.

"""Compiled decoder blocks do what blocks do as they are.

The backend `aot_eager` has the graphs of forward and backward passes that a compiler is given, and runs them by torch's
own kernels; `eager` has those of forward passes. Slow tests run inductor's kernels, too. To make a graph takes seconds.
"""

import copy
import dataclasses
import logging
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config
from safetensors import safe_open
from torch._dynamo.utils import counters
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from grail_lightning import ArithmeticData, LastCheckpoint, Loading, LoRA, Sampling
from grail_lightning.core.policy.compile import CompiledBlocks, chosen_backend
from grail_lightning.core.policy.layout import packed_layout, padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.trees import tree_layout
from grail_lightning.credit import GRAIL, SaliencyOptions, input_saliency
from tests.architectures import live, tiny
from tests.fake_cuda.attention import KERNELS
from tests.fake_cuda.device import NO_KERNEL
from tests.processes import on_ranks
from tests.runs import module, one_in_four, trainer, weights
from tests.same_rollouts import run_cases
from tests.steps import gap, steps
from tests.tolerance import assert_near

LIMIT = 36
# Inductor's own imports, and the compiler's way through functions with a backward pass of their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
GRAPHS = "aot_eager"


@pytest.fixture(autouse=True)
def _counted_anew():
    counters.clear()


@pytest.fixture(scope="module")
def batch():
    """12 rollouts of uneven lengths."""
    return one_in_four(3, Sampling(max_response_length=LIMIT))


def pair(backend=GRAPHS, **options):
    """The same policy as it is and compiled, in float64; adapters have an effect."""
    policies = []
    for compiled in (False, backend):
        torch.manual_seed(1)
        policies.append(live(load_policy("arithmetic", Loading(compile=compiled, **options))).double().train())
    assert policies[0].compiled_blocks is None
    return policies


@pytest.fixture(scope="module")
def policies():
    """A policy as it is, and compiled; graphs that a test has made are there for the next."""
    return pair()


def rows_of_length(columns):
    """Three rows of ids with a common beginning, and their masks."""
    ids = torch.randint(5, 40, (3, columns), generator=torch.Generator().manual_seed(columns))
    ids[1:, :10] = ids[0, :10]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -3:] = False
    return ids, mask, mask[:, 8:]


@pytest.mark.parametrize("share", [True, False], ids=["trees", "rows"])
def test_gradients_are_those_of_blocks_as_they_are(share, batch, policies):
    found = [steps(policy, batch, share, limit=LIMIT, token_budget=300)[0] for policy in policies]
    assert policies[1].compiled_blocks is not None
    assert not counters["graph_break"]
    for (theirs, expected), (ours, metrics) in zip(*found, strict=True):
        assert gap(ours, theirs) <= 1e-5  # Norms run in float32.
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


CASES = {  # Options of loading, whether rows share their beginnings, and the coefficient of the KL.
    "a reference": ({}, True, 0.1),
    "packed": ({"packing": True}, False, 0.0),
    "checkpointed": ({"gradient_checkpointing": True}, True, 0.0),
    "adapters": ({"lora": LoRA(rank=2)}, True, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_so_they_are_with_other_options(name, batch):
    loading, share, kl = CASES[name]
    found = []
    for policy in pair(**loading):
        reference = policy if "lora" in loading else load_policy("arithmetic", policy.loading, trainable=False).double()
        for weight in reference.blocks.parameters() if reference is not policy else ():
            weight.data *= 1.01
        options = {"limit": LIMIT, "token_budget": 300, "kl_coefficient": kl}
        found.append(steps(policy, batch, share, reference if kl else None, **options)[0])
    assert policy.compiled_blocks is not None
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 1
    for (theirs, expected), (ours, metrics) in zip(*found, strict=True):
        assert gap(ours, theirs) <= 1e-5  # Norms run in float32.
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama", "gemma2"])
def test_blocks_of_other_architectures_are_compiled(name, tmp_path):
    """Gemma 3 has blocks of two kinds, and Gemma 2 has eager attention, without trees."""
    policy = tiny(name, tmp_path, attention_dropout=0.0)
    layout = padded_layout(*rows_of_length(20))
    found = []
    for backend in (False, GRAPHS):
        policy.zero_grad()
        policy.loading = dataclasses.replace(policy.loading, compile=backend)
        vars(policy).pop("compiled_blocks", None)
        logprobs = policy(layout)
        logprobs.sum().backward()
        found.append((logprobs.detach(), {n: p.grad for n, p in policy.named_parameters()}))
    assert policy.compiled_blocks is not None
    assert not counters["graph_break"]
    (expected, theirs), (logprobs, ours) = found
    assert_near(logprobs, expected, 1000, torch.float32)
    assert gap(ours, theirs) <= 1e-4


@pytest.mark.slow
def test_blocks_are_compiled_under_autocast():
    plain, policy = (each.float() for each in pair())
    found = []
    for each in (plain, policy):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(tree_layout(*rows_of_length(30), [0])).sum()
        loss.backward()
        found.append({n: p.grad for n, p in each.named_parameters()})
    assert policy.compiled_blocks is not None
    assert not counters["graph_break"]
    assert gap(found[1], found[0]) <= 0.1


def test_blocks_are_compiled_once_for_all_shapes_of_a_layout(policies):
    _, policy = policies
    graphs = []
    for columns in (26, 31, 40, 57):
        rows = rows_of_length(columns)
        for layout in (padded_layout(*rows), tree_layout(*rows, [0])):
            policy(layout).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    # SDPA has another form for a mask whose rows are a multiple of 16.
    assert graphs[-1] - graphs[0] <= 1


@pytest.mark.slow
def test_saliency_is_that_of_blocks_as_they_are(batch, policies):
    plain, ours = policies
    for leaf in ("embeddings", "middle"):
        expected, found = (input_saliency(policy, batch, batch.response_mask, leaf=leaf) for policy in (plain, ours))
        assert expected.any()
        assert_near(found, expected, 64, torch.float32)
    together = [steps(p, batch, True, credit=GRAIL(), limit=LIMIT, token_budget=300) for p in (plain, ours)]
    (theirs, _, wanted), (steps_of_ours, _, weighed) = together
    assert torch.equal(weighed.values, wanted.values), "rows with saliency run as they are"
    for (other, _), (our, _) in zip(theirs, steps_of_ours, strict=True):
        assert gap(our, other) <= 1e-5


def test_one_pass_may_have_two_backward_passes(policies):
    _, policy = policies
    loss = policy(padded_layout(*rows_of_length(30))).sum()
    parameters = list(policy.blocks.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, parameters)))


def test_a_model_is_unchanged_outside_of_the_passes(tmp_path, policies):
    plain, policy = policies
    layout = padded_layout(*rows_of_length(30))
    expected = policy(layout)
    assert list(policy.state_dict()) == list(plain.state_dict())
    assert not any("forward" in vars(block) for block in policy.blocks)
    other = copy.deepcopy(policy)
    other.blocks[0].mlp.down_proj.weight.data.zero_()
    assert torch.equal(policy(layout), expected)
    assert not torch.equal(other(layout), expected)
    policy.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert not any("_orig_mod" in name for name in list(saved.keys()))


# --- attention by `varlen_attn` ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trees_by_flash_attention_are_compiled_as_a_whole():
    """On a CPU a definition by hand takes the kernel's place; it accepts half precision alone, as CUDA's does."""
    both = [load_policy("arithmetic", Loading(compile=c, dtype="bfloat16")).train() for c in (False, GRAPHS)]
    with _scoped_library("torch_attn", "IMPL") as library:
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU")
        for policy in both:
            policy.tree_kernel = "varlen"
        for columns in (26, 40):
            layout = tree_layout(*rows_of_length(columns), [0], kernel="varlen")
            assert "paths" in layout.attention.arguments(torch.bfloat16)
            results = []
            for policy in both:
                policy.zero_grad()
                logprobs = policy(layout)
                logprobs.sum().backward()
                results.append((logprobs.detach(), {n: p.grad for n, p in policy.named_parameters()}))
            (expected, theirs), (found, ours) = results
            assert_near(found, expected, 16, torch.bfloat16)
            assert gap(ours, theirs) <= 0.1
    assert both[1].compiled_blocks is not None
    assert not counters["graph_break"]


# --- what cannot be compiled ------------------------------------------------------------------------------------------


class OtherValues(Qwen3DecoderLayer):
    """A block with which a compiler goes wrong."""

    def forward(self, *args, **kwargs):
        states = super().forward(*args, **kwargs)
        return states * 2 if torch.compiler.is_compiling() else states


class OtherGradients(Qwen3DecoderLayer):
    """A block whose compiled backward pass is wrong."""

    def forward(self, *args, **kwargs):
        states = super().forward(*args, **kwargs)
        return 2 * states - states.detach() if torch.compiler.is_compiling() else states


@pytest.mark.parametrize(
    ("kind", "said"), [(OtherValues, "log-probabilities differ"), (OtherGradients, "gradients differ")]
)
def test_blocks_whose_compiled_results_differ_run_as_they_are(kind, said, caplog):
    plain, policy = pair("eager")
    for block in policy.blocks:
        block.__class__ = kind
    layout = padded_layout(*rows_of_length(30))
    with caplog.at_level("INFO"):
        found = policy(layout)
    assert torch.equal(found, plain(layout))
    (line,) = (record.getMessage() for record in caplog.records if "compiled" in record.getMessage())
    assert line == f"The decoder's blocks cannot be compiled and run as they are ({said})."


def without_a_compiler():
    """Whether the results of a policy are those of one as it is, and the lines that were said."""
    torch._inductor.config.cpp.cxx = ("no-such-compiler",)
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    plain, policy = pair("inductor")
    layout = padded_layout(*rows_of_length(30))
    return torch.equal(policy(layout), plain(layout)), [line for line in lines if "compiled" in line]


@pytest.mark.slow
def test_blocks_run_as_they_are_where_a_compiler_fails():
    """In a process of its own, since inductor finds its compiler once."""
    ((equal, (line,)),) = on_ranks(without_a_compiler, ranks=1)
    assert equal
    assert "cannot be compiled and run as they are (" in line
    assert "\n" not in line


def test_blocks_are_compiled_on_cuda_unless_runs_must_be_deterministic():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert chosen_backend("auto", cpu) is None
    assert chosen_backend("auto", cuda) == "inductor"
    for device in (cpu, cuda):
        assert [chosen_backend(option, device) for option in (True, False, "eager")] == ["inductor", None, "eager"]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_backend("auto", cuda) is None
        assert chosen_backend(True, cuda) == "inductor"
    finally:
        torch.use_deterministic_algorithms(False)


# --- runs -------------------------------------------------------------------------------------------------------------


def fit(folder, max_steps, path=None, backend=GRAPHS):
    """A run with GRAIL of two optimiser steps a batch; its weights, and the names in its checkpoint."""
    ours = module(
        {"group_size": 2, "mini_batches": 2, "entropy_coefficient": 0.1, "mask_truncated": False},
        sampling=Sampling(max_response_length=3),
        credit=GRAIL(saliency=SaliencyOptions(fuse=False), gate="all"),
        loading=Loading(compile=backend),
    )
    run = trainer(max_steps, LastCheckpoint(folder=str(folder)), enable_checkpointing=True)
    data = ArithmeticData(num_train=8, num_val=2, prompts_per_batch=2, eval_prompts_per_batch=2)
    run.fit(ours, data, ckpt_path=path, weights_only=False)
    assert bool(backend) == (ours.policy.compiled_blocks is not None)
    return weights(ours), torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [GRAPHS, "inductor"])
def test_a_resumed_run_ends_on_the_weights_of_a_whole_one(backend, tmp_path):
    whole, saved = fit(tmp_path / "whole", 4, backend=backend)
    assert {name.removeprefix("policy.") for name in saved} >= set(whole)
    assert not [name for name in saved if "_orig_mod" in name]
    half, _ = fit(tmp_path / "begun", 2, backend=backend)
    last = str(tmp_path / "begun" / "last.ckpt")
    resumed, _ = fit(tmp_path / "resumed", 4, last, backend=backend)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any(not torch.equal(half[name], whole[name]) for name in whole)
    if backend == GRAPHS:  # And a checkpoint of compiled blocks is one of blocks as they are.
        plain, _ = fit(tmp_path / "plain", 4, last, backend=False)
        assert all((plain[name] - whole[name]).norm() <= 1e-3 * whole[name].norm() for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_two_ranks_with_compiled_blocks_end_on_the_weights_of_blocks_as_they_are(strategy):
    cases = "GRAIL-own-recomputed", "GRAIL-own-recomputed-compiled"
    for plain, compiled in on_ranks(partial(run_cases, strategy), *cases, timeout=500):
        for figure in ("rank", "reductions", "gatherings", "synchronised", "live", "eligible"):
            assert compiled[figure] == plain[figure], figure
        assert (compiled["compiled"], plain["compiled"]) == (True, False)
        found, expected = (np.concatenate(report["weights"]) for report in (compiled, plain))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


# --- inductor ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductors_kernels_have_the_gradients_of_torchs():
    plain, policy = pair("inductor")
    for columns in (26, 31):
        rows = rows_of_length(columns)
        for layout in (padded_layout(*rows), tree_layout(*rows, [0]), packed_layout(*rows, flash=False)):
            found = []
            for each in (plain, policy):
                each.zero_grad()
                each(layout).sum().backward()
                found.append({n: p.grad for n, p in each.named_parameters()})
            theirs, ours = found
            assert gap(ours, theirs) <= 1e-5
    assert policy.compiled_blocks is not None
    assert not counters["graph_break"]


class Kernels(TorchDispatchMode):
    """Counts operators that start a kernel on a GPU."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function._schema.name.partition("::")[2] not in NO_KERNEL
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_kernels_of_a_compiled_block_are_within_their_budget():
    """Those of its forward and backward pass in half precision, in a tree by SDPA, as inductor makes them for a CPU."""
    policy = load_policy("arithmetic", Loading(dtype="bfloat16")).train()
    layout = tree_layout(*rows_of_length(30), [0])
    states = policy.embed(layout.ids).detach().requires_grad_()
    options = layout.attention.arguments(torch.bfloat16)
    angles = policy.decoder.rotary_emb(states, layout.positions)

    def run():
        return policy.blocks[1](states, position_embeddings=angles, **options).sum()

    with Kernels() as plain:
        run().backward()
    with CompiledBlocks(policy.blocks).running():
        _, sources = run_fw_bw_and_get_code(run)
    launch = r"^ +(?:\w+ = )?(\w*fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\("
    launched = re.findall(launch, "\n".join(sources), re.MULTILINE)
    products = [name for name in launched if name.startswith("extern_kernels")]
    assert len(products) == 7 * 3, "seven layers, their inputs' gradients and their weights'"
    assert len(launched) <= 44
    assert plain.number >= 4 * len(launched)

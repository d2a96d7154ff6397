"""Prefix trees by `flex_attention` on a CPU: by its definition in torch operations, and by its compiled kernel.

The kernel with a backward pass needs CUDA (tests/test_gpu.py). The layout and the mask are the same here.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from grail_lightning.batch import Sampling
from grail_lightning.policy import Loading, Policy, load_policy
from grail_lightning.policy.trees import make_block_mask
from tests import runs
from tests.steps import gap, steps

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
SAMPLING = Sampling(max_response_length=40)
LOADINGS = pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])


@pytest.fixture(scope="module")
def batch():
    return runs.one_in_four(4, SAMPLING)


@pytest.fixture
def take_flex(monkeypatch):
    """A function that makes trees of policies that are loaded later attend by `flex_attention`; it returns the calls.

    torch refuses gradients on a CPU, which has no kernel for them; the definition of the function has them.
    """
    calls = []
    attend = torch_flex.flex_attention

    def counted(*tensors, **options):
        calls.append(options["block_mask"])
        return attend(*tensors, **options)

    def take():
        monkeypatch.setattr(torch_flex, "_validate_device", _accept)
        monkeypatch.setattr("grail_lightning.policy.trees._flex_attention", lambda device: counted)
        monkeypatch.setattr(Policy, "tree_kernel", "flex")
        return calls

    return take


def _accept(query, key, value):
    """A device is fine."""


def policy_of(checkpointed):
    return load_policy("arithmetic", Loading(gradient_checkpointing=checkpointed)).double()


@LOADINGS
@pytest.mark.parametrize("budget", [4000, 300])
def test_gradients_by_flex_attention_are_those_of_whole_rows(batch, take_flex, budget, checkpointed):
    apart, _ = steps(policy_of(checkpointed), batch, False, token_budget=budget)
    calls = take_flex()
    shared, _ = steps(policy_of(checkpointed), batch, True, token_budget=budget)
    assert calls
    assert shared[0][1]["shared_tokens"] > 0.3
    for (ours, _), (theirs, _) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-5


@LOADINGS
def test_saliency_beside_an_update_by_flex_attention_is_that_of_whole_rows(batch, take_flex, checkpointed):
    """Two backward passes of one graph: to the embeddings, and to the weights."""
    found = {}
    for kernel in ("rows", "flex"):
        calls = take_flex() if kernel == "flex" else []
        policy, share = policy_of(checkpointed).train(), kernel == "flex"
        found[kernel] = runs.beside_the_update(policy, batch, "embeddings", SAMPLING, 1000, share_prefixes=share)
        assert bool(calls) == share
    (expected, weights), (gradients, by_flex) = found["rows"], found["flex"]
    assert (weights.scores != 0).any()
    torch.testing.assert_close(by_flex.scores, weights.scores, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(by_flex.values, weights.values, rtol=1e-6, atol=1e-9)
    assert gap(gradients, expected) <= 1e-5


def random_forest(number, seed):
    """``[N]`` long: what follows the descendants of each node of a forest in preorder."""
    random = torch.Generator().manual_seed(seed)
    end, open_nodes = [0] * number, []
    for node in range(number):
        while open_nodes and torch.rand(1, generator=random) < 0.4:
            end[open_nodes.pop()] = node
        open_nodes.append(node)
    for node in open_nodes:
        end[node] = number
    return torch.tensor(end)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # The compiler's libraries deprecate one another.
@pytest.mark.parametrize("key_heads", [2, 6])
def test_the_compiled_kernel_attends_along_the_paths_of_a_forest(key_heads):
    """Forward alone: the kernel of a CPU, which torch compiles with a C++ compiler, has no backward pass."""
    number, random = 384, torch.Generator().manual_seed(1)
    end = random_forest(number, seed=0)
    query, *keyed = (torch.randn(1, h, number, 64, generator=random) for h in (6, key_heads, key_heads))
    place = torch.arange(number)
    attends = (place <= place[:, None]) & (place[:, None] < end)
    assert 0.02 < attends.float().mean() < 0.4
    expected = scaled_dot_product_attention(query, *keyed, attn_mask=attends, enable_gqa=True)
    compiled = torch.compile(torch_flex.flex_attention)
    mask = make_block_mask(end, torch.device("cpu"))
    found = compiled(query, *keyed, block_mask=mask, enable_gqa=key_heads != 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

"""Gradients of credits against autograd token by token, and the products that are stored with the package."""

import pytest
import torch

from grail_lightning.app.benchmark.compared import (
    NUMBER,
    check_references,
    compute_references,
    on_every_token,
    read_references,
    uniform_batches,
    write_references,
)
from grail_lightning.app.benchmark.gain import balanced, gain_of
from grail_lightning.app.benchmark.gradients import policy_gradients, products
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE, open_world
from grail_lightning.app.benchmark.worlds import WORLDS
from tests.tolerance import assert_near, near


@pytest.fixture(scope="module")
def opened():
    with open_world("sums", 2) as world:
        yield world


def by_tokens(policy, batch, tables):
    """The sum of each token's advantage times the gradient of its log-probability, one row and token at a time."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    totals = [torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64) for _ in tables]
    for row in range(len(batch)):
        one = batch.select(torch.tensor([row]))
        width = int(one.response_mask.sum())
        logits = policy.model(input_ids=one.input_ids, use_cache=False).logits[0, -width - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, one.response_ids[0, :width, None])[:, 0]
        for t in range(width):
            parts = torch.autograd.grad(logprobs[t], parameters, retain_graph=True)
            gradient = torch.cat([p.flatten() for p in parts]).double()
            for total, advantages in zip(totals, tables, strict=True):
                total += float(advantages[row, t]) * gradient
    return totals


def test_gradients_are_those_of_autograd_token_by_token(opened):
    """Two prompts with four rollouts; a row without an advantage, and credits with a rollout's and a token's own."""
    rows = torch.tensor([0, 1, 2, GROUP_SIZE])
    batch = opened.batches[0].select(rows)
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randn(batch.response_mask.shape, generator=draws) * batch.response_mask
    tokens[1] = 0
    rollouts = torch.tensor([1.0, 0.0, -0.5, 2.0])[:, None] * batch.response_mask
    told = []
    credits = {"tokens": [tokens], "rollouts": [rollouts], "same": [tokens.clone()]}
    found = policy_gradients(opened.policy, [batch], credits, done=told.append)
    assert told == [1]
    assert found["same"] is found["tokens"]  # Equal credits are computed once.
    for name, expected in zip(credits, by_tokens(opened.policy, batch, [tokens, rollouts]), strict=False):
        assert_near(found[name][0].double(), expected, 200, torch.float32)
    assert all(p.grad is None for p in opened.policy.parameters())


def test_balanced_credit_has_the_praise_and_the_blame_of_uniform_credit(opened):
    """Also where the method's estimator had another baseline: right rows add up to the same, and wrong ones."""
    batch = uniform_batches(opened)[0]
    uniform = on_every_token(batch).double()
    lower = (batch.advantages[:, None] + 0.25 * (batch.advantages != 0)[:, None]) * batch.response_mask
    found = balanced(lower, batch, opened.context(0, 0)).double()
    for rows in (batch.correct, ~batch.correct):
        assert float(found[rows].sum()) == near(float(uniform[rows].sum()), 1000, torch.float32)
    assert float(lower[batch.correct].sum()) > 1.1 * float(uniform[batch.correct].sum())


@pytest.mark.slow
def test_references_are_computed_written_and_read(opened, tmp_path):
    """The baselines are linear in uniform credit and the rewards, and what a file keeps gives the same figures."""
    computed = compute_references(opened)
    half = [on_every_token(batch) for batch in uniform_batches(opened, 0.5)]
    direct = policy_gradients(opened.policy, opened.batches, {"half": half})["half"]
    assert_near(computed.constants["r - mean/2"].power, direct.double().square().sum(1), 1000, torch.float32)
    assert set(computed.limits) == {"Q - V", "Q - 3 V/4", "Q - V/2", "Q - V/4", "Q", "Q - b*"}
    file = tmp_path / "products.npz"
    write_references(computed, file)
    read = read_references(WORLDS["sums"], file)
    for part in ("own", "along", "adam"):
        table = getattr(computed.limits["Q - V/4"], part)
        assert_near(getattr(read.limits["Q - V/4"], part), (table + table.T) / 2, 2, torch.float32)
    check_references(read, computed.uniform, WORLDS["sums"])
    other = products(2 * direct, direct)
    with pytest.raises(ValueError, match="must be those of the packaged policy and its stored rollouts"):
        check_references(read, other, WORLDS["sums"])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_shipped_references_are_those_of_the_packaged_policy(name):
    """On two batches: the norms of uniform credit's gradients."""
    with open_world(name, 2) as opened:
        batches = [on_every_token(batch) for batch in uniform_batches(opened)]
        uniform = policy_gradients(opened.policy, opened.batches, {"uniform": batches})["uniform"]
    references = read_references(opened.world)
    assert references.number == NUMBER
    check_references(references, products(uniform, uniform), opened.world)


@pytest.mark.slow
def test_a_constant_gains_nothing_and_the_negative_of_uniform_credit_loses_as_much():
    with open_world("sums", 8) as opened:
        uniform = [on_every_token(batch) for batch in uniform_batches(opened)]
        found = gain_of(opened, [3 * one for one in uniform], {"Negative": [-one for one in uniform]})
    assert found.figures["gain"]["sgd"] == near([1.0] * 3, 1000, torch.float32)
    assert found.figures["gain"]["adam"] == near([1.0] * 3, 1000, torch.float32)
    assert found.figures["direction"] == near([1.0] * 3, 1000, torch.float32)
    assert found.figures["share_of_limit"]["adam"][0] == near(0.0, 1000, torch.float32, scale=1)
    assert found.figures["gain_beside_baseline"]["balanced"]["sgd"] == near([0.0] * 3, 1000, torch.float32, scale=1)
    assert found.figures["controls"]["Negative"]["gain"]["sgd"] == near([-1.0] * 3, 1000, torch.float32)
    assert found.figures["gain_beside_baseline"]["best_constant"]["adam"][2] < 0

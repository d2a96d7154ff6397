"""Saliency beside the update's own forward pass: the same weights and gradients as on its own."""

import pytest
import torch

from grail_lightning import SDPG, Loading, Sampling
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.step.assign import assign_credit
from grail_lightning.core.step.fused import SaliencyForward
from grail_lightning.credit import (
    GRAIL,
    CreditContext,
    PermutedRewards,
    SaliencyOptions,
    Shuffled,
    TokenCredit,
    Uniform,
)
from tests.batches import rollouts
from tests.runs import Watch, batches, module, problems, sampled, trainer
from tests.steps import backward, configured, largest_gap, update_of
from tests.tolerance import assert_near, roundings

SAMPLING = Sampling(max_response_length=40)


@pytest.fixture(scope="module")
def batch():
    """16 rollouts; most rewards are what they are not, so that gates have rows on either side."""
    policy = load_policy("arithmetic")
    made = sampled(policy, problems(4), 4, SAMPLING, seed=3)
    assert 0 < (~made.finished).sum() < 8
    return rollouts(made, torch.tensor([1.0, 0.0, 0.0, 0.0] * 3 + [1.0] * 4), tokenizer=policy.tokenizer)


def _context(**changes):
    return CreditContext(step=3, generator=torch.Generator().manual_seed(0), token_budget=400, **changes)


class Apart(TokenCredit):
    """A method whose saliency has a pass of its own, whatever the method says."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, policy, batch, context):
        return self.inner(policy, batch, context)


def _fuses(credit, policy, batch, control=None, **objective):
    """Whether saliency comes with the update's first forward pass."""
    clock = PhaseClock(policy.device)
    chosen, _ = configured(objective)
    forward, _ = assign_credit(credit, control, policy, batch, _context(), chosen, clock)
    return isinstance(forward, SaliencyForward)


def _trained(loading=None):
    return load_policy("arithmetic", loading).double().train()


def _run(policy, batch, credit, share, **options):
    """The gradients of each optimiser step, and the token weights that were used."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    credit = credit if share else Apart(credit)
    limit = SAMPLING.max_response_length
    # The temperature is not 1, so that a pass which forgets it differs from the other one.
    update = update_of(policy, batch, credit=credit, limit=limit, temperature=0.6, **{"token_budget": 400} | options)
    assert isinstance(update.forward, SaliencyForward) == share
    gradients = []
    for number in range(len(update.steps)):
        optimizer.zero_grad()
        update.accumulate(number, backward)
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, update.final_weights()


CHECKPOINTED = Loading(gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("leaf", "read_at", "cuts"),
    [
        ("embeddings", "predictor", {"mini_batches": 2, "num_iterations": 2, "share_prefixes": True}),
        ("middle", "token", {"mini_batches": 2, "share_prefixes": False, "split_groups": True}),
    ],
)
def test_weights_and_gradients_are_those_of_a_separate_pass_and_of_checkpointed_blocks(batch, leaf, read_at, cuts):
    """With rows that are trained at once and rows that are frozen first."""
    credit = GRAIL(saliency=SaliencyOptions(leaf=leaf, read_at=read_at))
    apart, expected = _run(_trained(), batch, credit, share=False, **cuts)
    beside, found = _run(_trained(), batch, credit, share=True, **cuts)
    assert_near(found.scores, expected.scores, 1, torch.float32)
    assert_near(found.values, expected.values, 1, torch.float32)
    assert found.metrics == expected.metrics
    assert len(beside) == len(apart) == 2 * cuts.get("num_iterations", 1)
    # The weights move between the steps: a rounding in the first gradient is in all that follow.
    for ours, theirs in zip(beside, apart, strict=True):
        assert largest_gap(ours, theirs) <= roundings(64, torch.float32)
    for share, kept, scores in ((False, apart, expected.scores), (True, beside, found.scores)):
        recomputed, weights = _run(_trained(CHECKPOINTED), batch, credit, share=share, **cuts)
        assert torch.equal(weights.scores, scores)
        for ours, theirs in zip(recomputed, kept, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_saliency_has_a_pass_of_its_own_where_the_result_would_differ(batch):
    policy, apart = _trained(), SaliencyOptions(fuse=False)
    assert _fuses(GRAIL(), policy, batch)
    anew = GRAIL(saliency=SaliencyOptions(refresh="step"))
    for credit in (anew, GRAIL(saliency=apart), PermutedRewards(GRAIL()), Uniform()):
        assert not _fuses(credit, policy, batch)
    for options in ({"control": Shuffled()}, {"entropy_coefficient": 0.1}, {"algorithm": SDPG}):
        assert not _fuses(GRAIL(), policy, batch, **options)
    for owner, rate in ((policy.blocks[0].self_attn, "attention_dropout"), (policy.blocks[0], "residual_dropout")):
        setattr(owner, rate, 0.1)  # Some blocks keep the rate as a number.
        assert not _fuses(GRAIL(), policy, batch)
        setattr(owner, rate, 0.0)
    assert _fuses(GRAIL(), policy, batch)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_training_step_gives_the_same_sharing_or_not(precision):
    runs = []
    for share in (False, True):
        watch, made = Watch(), module(credit=GRAIL(saliency=SaliencyOptions(fuse=share)), sampling=SAMPLING)
        trainer(1, watch, precision=precision).fit(made, batches(1, size=2))
        runs.append((watch.outputs[0], made))
    (apart, one), (beside, other) = runs
    assert apart.batch.texts == beside.batch.texts
    assert (apart.weights.scores != 0).any()
    if precision == "bf16-mixed":  # To 8 bits, or equal, depending on the kernels. Another test compares with float64.
        error = (beside.weights.scores - apart.weights.scores).norm() / apart.weights.scores.norm()
        assert error < 0.1
        return
    torch.testing.assert_close(beside.weights.values, apart.weights.values, rtol=1e-3, atol=1e-4)
    assert beside.metrics.keys() == apart.metrics.keys()
    assert beside.metrics["time/credit"] > 0
    for name in apart.metrics:
        if not name.startswith("time/") and name != "shared_tokens":  # Which are meant to differ.
            assert beside.metrics[name] == pytest.approx(apart.metrics[name], rel=1e-2, abs=1e-4), name
    for p, q in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3e-4)

"""Oracles are loops and closed forms written here."""

import math

import pytest
import torch

from grail_lightning.core.functional.policy_gradient import sampler_correction
from grail_lightning.functional import aggregate, clipped_surrogate, kl_estimate
from tests.tolerance import assert_near, near


@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 2.0, 3.1, 50.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_surrogate_clips_and_its_cap_is_the_constant_of_dual_clip(cap, ratio, advantage):
    lp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    ours = clipped_surrogate(lp, torch.zeros_like(lp), torch.full_like(lp, advantage), ratio_cap=cap)
    (slope,) = torch.autograd.grad(ours.sum(), lp)
    # Ye et al., equation 5: the clipped objective, and for a negative advantage not below c·A.
    plain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    least = -math.inf if cap is None or advantage >= 0 else cap * advantage
    assert ours.item() == near(-max(plain, least), 1000)
    moves = plain == ratio * advantage and plain > least
    assert slope.item() == near(-ratio * advantage if moves else 0.0, 1000)


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.0, 1.0), (1.2, 1.2), (4.0, 1.28)])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_cispo_clips_the_weight_of_a_token_and_keeps_its_gradient(ratio, weight, advantage):
    lp = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    old = lp.detach() - math.log(ratio)
    loss = clipped_surrogate(lp, old, torch.full_like(old, advantage), surrogate="cispo")
    (slope,) = torch.autograd.grad(loss.sum(), lp)
    assert loss.item() == near(2.0 * weight * advantage, 1000)  # −w·A·lp
    assert slope.item() == near(-weight * advantage, 1000)


def test_the_correction_for_the_sampler_is_a_ratio_with_a_ceiling():
    """It is 1 where the sampler reported nothing."""
    trainer = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0, -0.5, -4.0, math.nan]])
    found = sampler_correction(trainer, sampler, cap=2.0)
    assert found.tolist()[0] == pytest.approx([1.0, math.exp(-0.5), 2.0, 1.0])
    assert not found.requires_grad


def test_the_sequence_level_ratio_is_the_geometric_mean_and_its_gradient_each_tokens_own():
    lp = torch.tensor([[0.3, -0.1, 5.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    weights = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)
    loss = clipped_surrogate(lp, torch.zeros(1, 3), weights, mask=mask, level="sequence", clip_high=1.0)
    s = math.exp((0.3 - 0.1) / 2)
    assert loss[0, :2].tolist() == pytest.approx([-s, -s * 0.5])
    loss.sum().backward()
    assert lp.grad[0, :2].tolist() == pytest.approx([-s, -s * 0.5])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_their_formulas(estimator):
    p, q = math.log(0.7), math.log(0.4)
    formula = {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": 0.4 / 0.7 - (q - p) - 1}[estimator]
    found = kl_estimate(torch.tensor([[p]], dtype=torch.float64), torch.tensor([[q]], dtype=torch.float64), estimator)
    assert found.item() == near(formula, 1000)


@pytest.mark.parametrize("moved", [0.0, 0.5])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_corrected_kl_gradient_is_that_of_the_exact_kl(estimator, moved):
    """On a vocabulary of 5 the expectation over samples, of the policy itself or of an older one, is a sum."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64).log_softmax(0)
    old = (logits.detach() + moved * torch.randn(5, dtype=torch.float64)).log_softmax(0)
    lp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    expected = (old.exp() * kl_estimate(lp, ref, estimator, ratio=(lp - old).exp())).sum()
    (corrected,) = torch.autograd.grad(expected, logits, retain_graph=True)
    assert_near(corrected, exact, 1000, scale=1.0)
    (biased,) = torch.autograd.grad((old.exp() * kl_estimate(lp, ref, estimator)).sum(), logits)
    if estimator == "k2" and not moved:
        assert_near(biased, exact, 1000, scale=1.0)
    else:
        assert (biased - exact).abs().max() > 0.01, "the test must see the bias that the correction takes away"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("grpo", ((1 + 2 + 3) / 3 + 4) / 2),  # 3.0
        ("dr_grpo", (1 + 2 + 3 + 4) / (2 * 8)),  # 0.625
        ("dapo", (1 + 2 + 3 + 4) / 4),  # 2.5
    ],
)
def test_aggregations_by_hand(how, expected):
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = aggregate(losses, mask, how, num_rollouts=2, num_tokens=4, max_response_length=8)
    assert found.item() == near(expected, 1000)


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "dapo"])
def test_a_fully_masked_batch_has_loss_zero_and_a_zero_gradient(how):
    losses = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = aggregate(
        losses, torch.zeros(2, 3, dtype=torch.bool), how, num_rollouts=0, num_tokens=0, max_response_length=4
    )
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(losses.grad, torch.zeros(2, 3))

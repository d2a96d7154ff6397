"""The divergence from a teacher against a loop over the vocabulary."""

import math

import pytest
import torch

from grail_lightning.functional.certainty import teacher_divergence
from tests.tolerance import assert_near


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_a_loop_over_the_vocabulary(chunk_tokens, temperature):
    torch.manual_seed(0)
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(5, 13, dtype=torch.float64)
    found = teacher_divergence(hidden, teacher, head, temperature=temperature, chunk_tokens=chunk_tokens)
    slopes = torch.rand(9, dtype=torch.float64)
    inputs = [hidden, head.weight, head.bias, teacher]
    *grads, of_teacher = torch.autograd.grad((found * slopes).sum(), inputs, allow_unused=True)
    assert of_teacher is None
    expected, of_logits = [], torch.zeros(9, 13, dtype=torch.float64)
    for t in range(9):
        p, q = (torch.softmax(head(h[t]) / temperature, -1).tolist() for h in (hidden, teacher))
        kl = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        expected.append(kl)
        for v in range(13):
            slope = p[v] * (math.log(p[v]) - math.log(q[v]) - kl) / temperature
            of_logits[t, v] = slopes[t] * slope
    assert_near(found, torch.tensor(expected, dtype=torch.float64), 1000)
    by_hand = [of_logits @ head.weight, of_logits.T @ hidden, of_logits.sum(0)]
    for ours, theirs in zip(grads, by_hand, strict=True):
        assert_near(ours, theirs.detach(), 1000)

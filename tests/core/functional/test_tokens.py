import pytest
import torch
from torch.nn import functional as F

from grail_lightning.core.functional.tokens import HeadGradient
from grail_lightning.functional import masked_mean, masked_zscore, token_logprobs, token_stats
from tests.tolerance import assert_near


def _case(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 16, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(16, 50, dtype=dtype, bias=bias)
    return hidden, head, torch.randint(50, (3, 7))


@pytest.mark.parametrize(
    ("form", "chunk_tokens", "temperature", "cap", "cached"),
    [
        ("whole", 4, 0.6, 0.7, None),
        ("whole", 100, 1.0, None, None),
        ("written out", 1, 1.0, None, None),
        ("written out", 4, 0.6, 0.7, None),
        ("written out", 100, 0.6, None, None),
        # Blocks of 1, of 2 and of all rows of 50 logits.
        ("one product", 5, 0.6, None, 1),
        ("one product", 5, 1.0, None, 120),
        ("one product", 100, 0.6, None, 10**6),
    ],
)
def test_log_probabilities_and_gradients_equal_cross_entropy(form, chunk_tokens, temperature, cap, cached, monkeypatch):
    hidden, linear, ids = _case(bias=form != "one product")
    if cached is not None:
        monkeypatch.setattr("grail_lightning.core.functional.tokens.CACHED", cached)

    def head(states):
        return linear(states) if cap is None else torch.tanh(linear(states) / cap) * cap

    logits = head(hidden) / temperature
    expected = -F.cross_entropy(logits.reshape(-1, 50), ids.reshape(-1), reduction="none").reshape(3, 7)
    inputs = [hidden, *linear.parameters()]
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    weight = linear.weight if form == "one product" else None
    trained = None if form == "whole" else HeadGradient(inputs[1:], weight)
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens}
    found = token_stats(hidden, head, ids, head_gradient=trained, **options)
    assert_near(found.logprobs, expected, 1000)
    for ours, theirs in zip(torch.autograd.grad(found.logprobs.square().sum(), inputs), expected_grads, strict=True):
        assert_near(ours, theirs, 1000)
    assert_near(found.entropy, torch.distributions.Categorical(logits=logits).entropy(), 1000)
    assert not found.entropy.requires_grad


@pytest.mark.parametrize(("frozen", "chunk_tokens"), [(False, 4), (True, 100)])
def test_a_head_in_half_precision_that_is_one_product_gives_the_same(frozen, chunk_tokens):
    hidden, head, ids = _case(torch.bfloat16, bias=False)
    head.weight.requires_grad_(not frozen)
    inputs = [hidden] if frozen else [hidden, head.weight]
    results = []
    for trained in (None, HeadGradient([head.weight], head.weight)):
        options = {"temperature": 0.6, "chunk_tokens": chunk_tokens, "head_gradient": trained}
        found = token_logprobs(hidden, head, ids, **options)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    assert torch.equal(results[0][0], results[1][0])
    for theirs, ours in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert_near(ours, theirs, 8)


@pytest.mark.parametrize("written_out", [False, True])
def test_no_token_has_an_empty_result_and_a_gradient_of_zero(written_out):
    hidden, head, _ = _case()
    trained = HeadGradient([head.weight]) if written_out else None
    none = torch.zeros(3, 0, dtype=torch.long)
    found = token_stats(hidden[:, :0], head, none, head_gradient=trained)
    assert found.logprobs.shape == found.entropy.shape == (3, 0)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), hidden)
    assert torch.equal(grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_the_entropy_carries_a_gradient_on_request(chunk_tokens):
    hidden, head, ids = _case()
    expected = torch.distributions.Categorical(logits=head(hidden)).entropy()
    expected_grads = torch.autograd.grad(expected.square().sum(), [hidden, head.weight])
    options = {"chunk_tokens": chunk_tokens, "head_gradient": HeadGradient([head.weight])}
    found = token_stats(hidden, head, ids, entropy_gradient=True, **options)
    grads = torch.autograd.grad(found.entropy.square().sum(), [hidden, head.weight])
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert_near(ours, theirs, 1000)


def test_a_frozen_part_of_the_head_gets_no_gradient():
    hidden, head, ids = _case()
    head.weight.requires_grad_(False)
    trained = HeadGradient([head.weight, head.bias])
    token_logprobs(hidden, head, ids, chunk_tokens=4, head_gradient=trained).sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad.abs().sum() > 0
    assert hidden.grad.abs().sum() > 0


def test_the_backward_pass_repeats_the_precision_of_the_forward_pass():
    hidden, head, ids = _case(torch.float32)

    def gradients(trained, chunk_tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = token_logprobs(hidden, head, ids, chunk_tokens=chunk_tokens, head_gradient=trained)
        return torch.autograd.grad(found.sum(), [hidden, head.weight])

    for ours, theirs in zip(gradients(HeadGradient([head.weight]), 4), gradients(None, 100), strict=True):
        assert ours.dtype == torch.float32
        assert_near(ours, theirs, 4, torch.bfloat16)


@pytest.mark.parametrize("written_out", [False, True])
def test_no_logits_of_all_tokens_are_made_and_backwards_only_those_that_a_loss_asks_for(written_out):
    hidden, head, ids = _case()
    asked = torch.zeros(3, 7, dtype=torch.bool)
    asked[0, 2] = asked[2, 4] = asked[2, 5] = True
    seen = []

    def watched(states):
        seen.append(len(states))
        return head(states)

    trained = HeadGradient([head.weight]) if written_out else None
    found = token_logprobs(hidden, watched, ids, chunk_tokens=4, head_gradient=trained)
    found[asked].square().sum().backward()
    assert max(seen) == 4
    assert sum(seen) == (21 + 3 if written_out else 2 * 21)
    expected = head(hidden).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)[asked]
    of_hidden, of_weight = torch.autograd.grad(expected.square().sum(), [hidden, head.weight])
    assert_near(hidden.grad, of_hidden, 1000)
    assert_near(head.weight.grad, of_weight, 1000)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_a_head_adds_its_gradient_to_what_is_there_only_when_it_is_told_to(chunk_tokens):
    hidden, head, ids = _case(bias=False)

    def loss(in_place):
        gradient = HeadGradient([head.weight], head.weight, in_place)
        found = token_logprobs(hidden, head, ids, chunk_tokens=chunk_tokens, head_gradient=gradient)
        return found.square().sum()

    expected = torch.autograd.grad(loss(in_place=False), head.weight)[0]
    assert head.weight.grad is None
    loss(in_place=True).backward()
    held = head.weight.grad
    loss(in_place=True).backward()
    assert head.weight.grad is held
    assert_near(held, 2 * expected, 1000)


def test_masked_statistics_do_not_see_what_is_masked():
    values = torch.tensor([[1.0, 3.0, torch.nan]])
    mask = torch.tensor([[True, True, False]])
    assert masked_mean(values, mask).item() == 2
    # mean 2, population variance 1: z = ∓1
    assert masked_zscore(values, mask).tolist() == [pytest.approx([-1.0, 1.0, 0.0])]
    assert masked_mean(values, torch.zeros(1, 3, dtype=torch.bool)).item() == 0

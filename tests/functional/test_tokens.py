import pytest
import torch
from torch.nn import functional as F

from grail_lightning.functional import masked_mean, masked_zscore, token_logprobs


def _case(dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 16, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(16, 50, dtype=dtype)
    return hidden, head, torch.randint(50, (3, 7))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_log_probabilities_and_gradients_equal_cross_entropy(chunk_tokens, temperature):
    hidden, head, ids = _case()
    logits = head(hidden) / temperature
    expected = -F.cross_entropy(logits.reshape(-1, 50), ids.reshape(-1), reduction="none").reshape(3, 7)
    expected_grads = torch.autograd.grad(expected.square().sum(), [hidden, head.weight])
    found = token_logprobs(hidden, head, ids, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True)
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(found.logprobs.square().sum(), [hidden, head.weight])
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=1e-12)
    assert not found.entropy.requires_grad


def test_no_logits_of_all_tokens_are_ever_made():
    hidden, head, ids = _case()
    seen = []

    def watched(states):
        seen.append(len(states))
        return head(states)

    token_logprobs(hidden, watched, ids, chunk_tokens=4).logprobs.sum().backward()
    assert max(seen) == 4
    assert sum(seen) == 2 * 21  # 21 positions forward, and once more in the backward pass


def test_half_precision_heads_are_reduced_in_float32():
    hidden, head, ids = _case(torch.bfloat16)
    assert token_logprobs(hidden, head, ids).logprobs.dtype == torch.float32


def test_no_token_at_all_still_has_a_backward_pass():
    hidden = torch.zeros(0, 16, requires_grad=True)
    token_logprobs(hidden, torch.nn.Linear(16, 50), torch.zeros(0, dtype=torch.long)).logprobs.sum().backward()
    assert hidden.grad.shape == (0, 16)


def test_temperature_zero_is_an_error():
    hidden, head, ids = _case()
    with pytest.raises(ValueError, match="`temperature` must be positive, but got 0"):
        token_logprobs(hidden, head, ids, temperature=0)


def test_masked_statistics_do_not_see_what_is_masked():
    values = torch.tensor([[1.0, 3.0, torch.nan]])
    mask = torch.tensor([[True, True, False]])
    assert masked_mean(values, mask).item() == 2
    # mean 2, population variance 1: z = ∓1
    assert masked_zscore(values, mask).tolist() == [pytest.approx([-1.0, 1.0, 0.0])]
    assert masked_mean(values, torch.zeros(1, 3, dtype=torch.bool)).item() == 0

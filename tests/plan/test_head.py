"""Memory of the log-probabilities: by hand, and beside what they really allocate."""

import pytest
import torch

from grail_lightning.functional.tokens import HeadGradient, token_logprobs
from grail_lightning.plan.head import Head, block_rows, chunk_tokens, head_bytes, kept_gradient
from grail_lightning.plan.live import Live

FLOAT = {"weight": 4, "compute": 4, "state": 4}


def test_the_parts_of_one_chunk_by_hand():
    # V = 100, D = 10, M = 20 predictions in one chunk, 5 rows at a time, gradient added in place.
    head = Head(vocabulary=100, hidden=10, in_place=True, **FLOAT)
    states, logits, block = 20 * 10 * 4, 20 * 100 * 4, 5 * 100 * 4
    # Backward: the states and their gradient, the logits and a copy of them, a chunk's states, a block's slope.
    assert head_bytes(head, 20, chunk=20, rows=5) == 2 * states + 2 * logits + states + block
    apart = Head(vocabulary=100, hidden=10, **FLOAT)
    assert head_bytes(apart, 20, 20, 5) - head_bytes(head, 20, 20, 5) == 100 * 10 * 4, "the gradient of the weight"


def test_the_heads_gradient_waits_for_the_embeddings_if_they_are_one():
    sizes = {"vocabulary": 100, "hidden": 10, **FLOAT}
    assert kept_gradient(Head(**sizes, tied=True)) == 4000
    assert kept_gradient(Head(**sizes)) == kept_gradient(Head(**sizes, tied=True, in_place=True)) == 0
    assert kept_gradient(Head(**sizes, tied=True, trained=False)) == 0


def test_chunks_are_those_of_the_policy(arithmetic):
    vocabulary = arithmetic.model.config.vocab_size
    assert chunk_tokens(arithmetic.loading.chunk_tokens, vocabulary, cpu=True) == arithmetic.chunk_tokens
    assert chunk_tokens(1024, 151_936, cpu=True) == 2**25 // 151_936
    assert chunk_tokens(1024, 151_936, cpu=False) == 1024
    assert (block_rows(1024, 151_936, cpu=True), block_rows(1024, 151_936, cpu=False)) == (6, 1024)


@pytest.mark.parametrize("predictions", [300, 1000])
@pytest.mark.parametrize("how", ["in place", "apart", "half", "autocast", "frozen", "scaled"])
def test_bytes_are_those_that_are_allocated(how, predictions):
    """Within a tenth, where a chunk's temporaries do not all exist at the same moment."""
    vocabulary, hidden, chunk = 6000, 64, 400
    dtype = torch.bfloat16 if how == "half" else torch.float32
    layer = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    layer.requires_grad_(how != "frozen")
    layer.weight.grad = torch.zeros_like(layer.weight) if how in ("in place", "scaled") else None
    states = torch.randn(predictions, hidden, dtype=dtype, requires_grad=True)
    ids = torch.randint(vocabulary, (predictions,))
    temperature = 0.7 if how == "scaled" else 1.0
    gradient = HeadGradient(list(layer.parameters()) if how != "frozen" else [], layer.weight, "in" in how)
    gradient = gradient._replace(in_place=layer.weight.grad is not None)
    with Live() as live, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast", cache_enabled=False):
        copied = states + 0  # The policy gathers the states of the predictors.
        options = {"chunk_tokens": chunk, "with_entropy": True, "head_gradient": gradient}
        found = token_logprobs(copied, layer, ids, temperature=temperature, **options)
        found.logprobs.sum().backward()
    element = 2 if how == "half" else 4
    head = Head(
        vocabulary=vocabulary,
        hidden=hidden,
        weight=element,
        compute=2 if how == "autocast" else element,
        state=element,
        trained=how != "frozen",
        in_place=layer.weight.grad is not None and how in ("in place", "scaled"),
        scaled=how == "scaled",
    )
    planned = head_bytes(head, predictions, chunk, block_rows(chunk, vocabulary, cpu=True))
    assert planned == pytest.approx(live.peak, rel=0.1)

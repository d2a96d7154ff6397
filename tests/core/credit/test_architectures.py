"""GRAIL, OAR-G and OAR-P on the decoders people train, against whole-model passes over one unpadded row at a time."""

import itertools

import pytest
import torch

from grail_lightning import LoRA
from grail_lightning.core.credit.saliency import SaliencyTarget, forward_with_saliency
from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.credit import GRAIL, OARGradient, OARPerturbation
from tests.architectures import ARCHITECTURES, per_layer, tiny
from tests.batches import of_ids, rollouts
from tests.core.credit.rollouts import context, golden_error, logits_and_leaf, row_ids, row_perturbation, row_saliency
from tests.tolerance import roundings

# Each architecture with both heads, and with and without adapters; and each leaf with each alignment.
MODELS = itertools.product(ARCHITECTURES, (("tied", None), ("untied", LoRA(rank=2, dropout=0.1))))
NUMBERS = ("embeddings", 0), ("first", 1), ("middle", 2), ("last", 3), (4, 4)
LEAVES = itertools.product(("predictor", "token"), NUMBERS)
PROMPTS, LENGTHS = (3, 6, 5), (14, 9, 12)
# Norms run in float32 inside most of these models; Gemma 2 runs in it altogether (see `tiny`).
CLOSE = dict.fromkeys(ARCHITECTURES, roundings(100, torch.float32)) | {"gemma2": roundings(1000, torch.float32)}
BOXES = ((8, 12), (5, 9), None)  # A row with tokens behind its box, one without, and one without a box.
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def batch():
    """Three rows of uneven prompts and responses."""
    random = torch.Generator().manual_seed(0)
    prompts, responses = (
        [torch.randint(3, 448, (n,), generator=random).tolist() for n in of] for of in (PROMPTS, LENGTHS)
    )
    rows = of_ids(prompts, responses)
    whole, content, after = torch.zeros(3, *rows.response_mask.shape, dtype=torch.bool)
    for k, (first, stop) in enumerate(BOXES[:2]):
        whole[k, first:stop] = content[k, first + 1 : stop - 1] = True
        after[k, stop : LENGTHS[k]] = True
    answer = AnswerMasks(whole=whole, content=content, marker=whole & ~content, after=after)
    return rollouts(rows, advantages=torch.tensor([-0.6, 0.4, 0.2]), answer=answer)


def _context():
    return context(budget=60, temperature=TEMPERATURE, seed=3)


def _saliency(policy, batch, number=0, read_at="predictor"):
    return torch.stack([row_saliency(policy, batch, row, number, read_at, TEMPERATURE) for row in (0, 1)])


def _oar_g(policy, batch):
    """One gradient under the same noise."""
    found = torch.zeros(batch.response_mask.shape, dtype=torch.float64)[:2]
    for k, (first, stop) in enumerate(BOXES[:2]):
        ids, start = row_ids(batch, k)
        noise = torch.zeros(1, ids.shape[1], 32, dtype=torch.float64)
        noise[0, start : start + first] = 1e-3 * torch.randn(first, 32, generator=_context().row_generator(k))
        clean_logits, clean = logits_and_leaf(policy, ids)
        noisy_logits, noisy = logits_and_leaf(policy, ids, noise=noise)
        answer = slice(start + first - 1, start + stop - 1)
        log_p, log_q = (logits[answer].mean(0).log_softmax(-1) for logits in (clean_logits, noisy_logits))
        divergence = (log_p.detach().exp() * (log_p.detach() - log_q)).sum()
        (gradient,) = torch.autograd.grad(divergence, noisy)
        found[k, : LENGTHS[k]] = (gradient * clean)[0].sum(-1).abs()[start:].detach()
    return found


def _oar_p(policy, batch):
    """One pass for each token."""
    found = torch.zeros(batch.response_mask.shape, dtype=torch.float64)[:2]
    for k, (first, _) in enumerate(BOXES[:2]):
        for token in range(first):
            found[k, token] = row_perturbation(policy, batch, k, token)
    return found


@pytest.mark.parametrize(("model", "leaf"), [*zip(MODELS, LEAVES, strict=True)], ids=str)
def test_scores_and_gradients_are_those_of_the_whole_model(model, leaf, batch, tmp_path):
    (name, (head, lora)), (read_at, (leaf, number)) = model, leaf
    policy = tiny(name, tmp_path, lora, tie_word_embeddings=head == "tied").eval()
    boxed = batch.response_mask[:2]
    weights = GRAIL(gate="all")(policy, batch, _context())
    expected = _saliency(policy, batch)
    assert golden_error(weights.scores[:2], expected, boxed) < CLOSE[name]
    assert (expected > 0).sum() >= 18, "it is not zero against zero"
    assert weights.fallback.tolist() == [False, False, True]
    found = OARGradient()(policy, batch, _context()).scores[:2]
    # The divergence is of second order in noise of 1e-3: a float32 rounding weighs a thousand times as much.
    assert golden_error(found, _oar_g(policy, batch), boxed) < 100 * CLOSE[name]
    found = OARPerturbation()(policy, batch, _context()).scores[:2]
    assert golden_error(found, _oar_p(policy, batch), boxed) < CLOSE[name]

    rows = batch.select(torch.tensor([0, 1]))
    options = {"explained": rows.answer.whole, "rows": torch.ones(2, dtype=torch.bool), "leaf": leaf}
    target, layout = SaliencyTarget(**options, read_at=read_at), policy.layout(rows)
    stats, saliency = forward_with_saliency(policy, layout, target, temperature=TEMPERATURE)
    assert golden_error(saliency(), _saliency(policy, batch, number, read_at), boxed) < CLOSE[name]
    assert all(p.grad is None for p in policy.parameters())
    stats.logprobs.sum().backward()
    found = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    policy.zero_grad()
    policy(layout, temperature=TEMPERATURE).sum().backward()
    for n, gradient in found.items():
        expected = policy.get_parameter(n).grad
        atol = max(1e-30, CLOSE[name] * expected.abs().max().item())
        torch.testing.assert_close(gradient, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("what", ["embeddings for each layer", "a block that runs twice"])
def test_a_pass_with_saliency_has_the_policys_own_log_probabilities(what, batch, tmp_path, arithmetic):
    policy = per_layer(arithmetic.tokenizer) if "embeddings" in what else tiny("qwen3", tmp_path).eval()
    if "twice" in what:
        policy.blocks[2] = policy.blocks[1]
    layout = policy.layout(batch)
    target = {"explained": batch.answer.whole, "rows": torch.ones(3, dtype=torch.bool)}
    for leaf in ("embeddings", "middle"):
        stats, saliency = forward_with_saliency(policy, layout, SaliencyTarget(**target, leaf=leaf), temperature=1.0)
        assert torch.equal(stats.logprobs, policy(layout))
        assert saliency().any()

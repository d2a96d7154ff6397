"""GRAIL, OAR-G and OAR-P on the decoders people train, against whole-model passes over one unpadded row at a time."""

import itertools

import pytest
import torch

from grail_lightning.batch import AnswerMasks
from grail_lightning.credit import GRAIL, CreditContext, OARGradient, OARPerturbation, input_saliency
from grail_lightning.credit.saliency import SaliencyTarget, forward_with_saliency
from grail_lightning.policy import LoRA
from tests.architectures import ARCHITECTURES, tiny
from tests.batches import of_ids, rollouts
from tests.credit.rollouts import golden_error
from tests.tolerance import assert_near, roundings

# Pairs of the three: each architecture with both heads, and with and without adapters; and each with one of the two.
CASES = [(name, *form) for name in ARCHITECTURES for form in (("tied", "all"), ("untied", "lora"))]
SOME = [case for number, case in enumerate(CASES) if number % 4 in (0, 3)]
PROMPTS, LENGTHS = (3, 6, 5), (14, 9, 12)
# Norms run in float32 inside most of these models; Gemma 2 runs in it altogether (see `policies`).
CLOSE = dict.fromkeys(ARCHITECTURES, roundings(100, torch.float32)) | {"gemma2": roundings(1000, torch.float32)}
BOXES = ((8, 12), (5, 9), None)  # A row with tokens behind its box, one without, and one without a box.
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Tiny random policies of each architecture, built once by the package's own loading."""
    built = {}

    def policy(name, head="tied", trained="all"):
        if (name, head, trained) not in built:
            torch.manual_seed(len(built))
            lora = LoRA(rank=2, dropout=0.1) if trained == "lora" else None
            made = tiny(name, tmp_path_factory.mktemp(name), lora, tie_word_embeddings=head == "tied")
            built[name, head, trained] = made
        built[name, head, trained].zero_grad()
        return built[name, head, trained].eval()

    return policy


@pytest.fixture(scope="module")
def batch():
    """Three rows of uneven prompts and responses, two of them with a box."""
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


def _context(budget=60):
    generator = torch.Generator().manual_seed(3)
    return CreditContext(step=0, generator=generator, token_budget=budget, temperature=TEMPERATURE)


# --- the oracle: the whole model as Transformers calls it, no padding, no cutting, gradients of everything --------


def _row(batch, k):
    """The row's ids, where its response begins, and the places of its answer in the response."""
    return batch.input_ids[k][batch.attention_mask[k]][None].long(), PROMPTS[k], range(*BOXES[k])


def _logits(policy, ids, number=0, noise=None):
    """All logits ``[n, V]``; and the output ``[n, D]`` of the embedding (0) or of a block, noise added, as a leaf."""
    stack = policy.model.get_decoder()
    caught = []

    def catch(module, inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        caught.append((tensor if noise is None else tensor + noise.to(tensor)).detach().requires_grad_())
        return (caught[0], *output[1:]) if isinstance(output, tuple) else caught[0]

    hook = (stack.embed_tokens if number == 0 else stack.layers[number - 1]).register_forward_hook(catch)
    try:
        logits = policy.model(input_ids=ids, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits, caught[0]


def _saliency(policy, batch, number=0, alignment="predictor"):
    found = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for k in range(2):
        ids, start, answer = _row(batch, k)
        logits, leaf = _logits(policy, ids, number)
        phi = 0.0
        for t in answer:
            phi = phi - (logits[start + t - 1] / TEMPERATURE).log_softmax(-1)[ids[0, start + t]]
        (gradient,) = torch.autograd.grad(phi, leaf)
        norms = (gradient * leaf)[0].square().sum(-1).sqrt()
        for t in range(LENGTHS[k]):
            found[k, t] = norms[start + t - (alignment == "predictor")]
    return found.detach()


def _answer_log_p(logits, start, answer):
    return torch.stack([logits[start + t - 1] for t in answer]).mean(0).log_softmax(-1)


def _oar_g(policy, batch):
    found = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for k in range(2):
        ids, start, answer = _row(batch, k)
        noise = torch.zeros(1, ids.shape[1], 32, dtype=torch.float64)
        drawn = torch.randn(answer.start, 32, generator=_context().row_generator(k))
        noise[0, start : start + answer.start] = 1e-3 * drawn
        clean_logits, clean = _logits(policy, ids)
        noisy_logits, noisy = _logits(policy, ids, noise=noise)
        log_p = _answer_log_p(clean_logits, start, answer).detach()
        divergence = (log_p.exp() * (log_p - _answer_log_p(noisy_logits, start, answer))).sum()
        (gradient,) = torch.autograd.grad(divergence, noisy)
        found[k, : LENGTHS[k]] = (gradient * clean)[0].sum(-1).abs()[start:].detach()
    return found


@torch.no_grad()
def _oar_p(policy, batch):
    found = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for k in range(2):
        ids, start, answer = _row(batch, k)
        log_p = _answer_log_p(policy.model(ids, use_cache=False).logits[0], start, answer)
        for t in range(answer.start):
            changed = ids.clone()
            changed[0, start + t] = policy.tokenizer.pad_token_id
            moved = _answer_log_p(policy.model(changed, use_cache=False).logits[0], start, answer)
            found[k, t] = (log_p.exp() * (log_p - moved)).sum()
    return found


def _grail_weights(scores, batch):
    """The map and the overwrite with loops; rows with a box, none of them gated out."""
    weights = torch.zeros_like(scores)
    for k, box in enumerate(BOXES):
        logs = [(s + 1e-8).log().item() for s in scores[k, : LENGTHS[k]]]
        mean = sum(logs) / len(logs)
        deviation = (sum((x - mean) ** 2 for x in logs) / len(logs) + 1e-8) ** 0.5
        for t, x in enumerate(logs):
            weights[k, t] = min(max(1 + 0.5 * (x - mean) / deviation, 0.5), 5.0) if box else 1.0
            if box and t >= box[0]:
                weights[k, t] = 5.0 if box[0] < t < box[1] - 1 else 1.0
    return weights


# --- parity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head", "trained"), CASES)
def test_scores_are_those_of_the_whole_model(name, head, trained, policies, batch):
    """GRAIL: one gradient; OAR-G: one under the same noise; OAR-P: one pass for each token."""
    policy = policies(name, head, trained)
    boxed = batch.response_mask[:2]
    weights = GRAIL(gate="all")(policy, batch, _context())
    expected = _saliency(policy, batch)
    assert golden_error(weights.scores[:2], expected[:2], boxed) < CLOSE[name]
    assert (expected[:2] > 0).sum() >= 18, "it is not zero against zero"
    assert_near(weights.values.double(), _grail_weights(expected, batch), 200, torch.float32)
    assert weights.fallback.tolist() == [False, False, True]
    found = OARGradient()(policy, batch, _context()).scores[:2]
    # The divergence is of second order in noise of 1e-3: a float32 rounding weighs a thousand times as much.
    assert golden_error(found, _oar_g(policy, batch)[:2], boxed) < 100 * CLOSE[name]
    found = OARPerturbation()(policy, batch, _context()).scores[:2]
    assert golden_error(found, _oar_p(policy, batch)[:2], boxed) < CLOSE[name]


LEAVES = itertools.product(
    [("embeddings", 0), ("first", 1), ("middle", 2), ("last", 3), (4, 4)], ["predictor", "token"]
)
MODELS = itertools.cycle([("qwen3", "all"), ("gemma3", "lora"), ("mistral", "all")])


@pytest.mark.parametrize(("which", "alignment", "model"), [(*leaf, next(MODELS)) for leaf in LEAVES], ids=str)
def test_every_leaf_and_alignment_is_the_gradient_of_the_whole_model(which, alignment, model, policies, batch):
    (leaf, number), (name, trained) = which, model
    policy = policies(name, "untied", trained)
    rows = batch.select(torch.tensor([0, 1]))
    found = input_saliency(policy, rows, rows.answer.whole, leaf=leaf, alignment=alignment, temperature=TEMPERATURE)
    expected = _saliency(policy, batch, number, alignment)[:2]
    assert golden_error(found, expected, rows.response_mask) < CLOSE[name]


@pytest.mark.parametrize(("name", "head", "trained"), SOME)
def test_fused_saliency_and_loss_gradients_equal_those_of_the_whole_model(name, head, trained, policies, batch):
    policy = policies(name, head, trained)
    rows = batch.select(torch.tensor([0, 1]))
    target = SaliencyTarget(explained=rows.answer.whole, rows=torch.ones(2, dtype=torch.bool))
    layout = policy.layout(rows)
    stats, saliency = forward_with_saliency(policy, layout, target, temperature=TEMPERATURE)
    assert golden_error(saliency(), _saliency(policy, batch)[:2], rows.response_mask) < CLOSE[name]
    assert all(p.grad is None for p in policy.parameters())
    stats.logprobs.sum().backward()
    found = {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}
    policy.zero_grad()
    policy(layout, temperature=TEMPERATURE).logprobs.sum().backward()
    for n, parameter in policy.named_parameters():
        if parameter.requires_grad:
            scale = parameter.grad.abs().max()
            torch.testing.assert_close(found[n], parameter.grad, rtol=0, atol=max(1e-30, CLOSE[name] * scale.item()))

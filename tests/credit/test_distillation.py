"""RLSD against loops over the model's own logits, behind both prompts."""

import copy
import math

import pytest
import torch

from grail_lightning.credit import RLSD
from grail_lightning.credit.distillation import with_sentence
from tests.credit.rollouts import context, in_groups
from tests.tolerance import near


@torch.no_grad()
def _logprobs_by_hand(policy, prompt, response, temperature):
    ids = [*policy.tokenizer(prompt)["input_ids"], *response]
    logits = policy.model(torch.tensor([ids]), use_cache=False).logits[0].double() / temperature
    start = len(ids) - len(response)
    return [logits[start + t - 1].log_softmax(0)[token].item() for t, token in enumerate(response)]


def _by_hand(teacher, student, batch, row, share, temperature, sentence):
    """The weights of one row."""
    response = batch.response_ids[row, : int(batch.response_lengths[row])].tolist()
    prompt = batch.prompts[row].messages
    shown = prompt.removesuffix("\n") + " " + sentence.replace("{answer}", str(10 * row)) + "\n"
    sign = math.copysign(1, batch.advantages[row].item())
    pairs = zip(
        _logprobs_by_hand(teacher, shown, response, temperature),
        _logprobs_by_hand(student, prompt, response, temperature),
        strict=True,
    )
    clipped = [min(max(math.exp(sign * (t - s)), 0.8), 1.2) for t, s in pairs]
    return [1 - share + share * w for w in clipped]


@pytest.mark.parametrize("sentence", ["The correct answer is {answer}.", r"($\frac{{answer}}{1}$)"])
def test_weights_are_those_of_the_formula(sentence, golden_policy, golden_batch):
    batch = in_groups(golden_batch)
    # Step 20 of 50: λ = 0.5 · 0.6 = 0.3.
    weights = RLSD(sentence=sentence)(golden_policy, batch, context(step=20, temperature=0.7))
    for row in range(5):
        expected = _by_hand(golden_policy, golden_policy, batch, row, 0.3, 0.7, sentence)
        assert weights.values[row, : len(expected)].tolist() == near(expected, 100, torch.float32)
        assert (weights.values[row, len(expected) :] == 0).all()
    assert torch.equal(weights.values[5], batch.response_mask[5].to(weights.values)), "no advantage: uniform"
    inside = weights.values[:5][batch.response_mask[:5]]
    assert inside.unique().numel() > 20, "not all of them are clipped"


def test_after_the_decay_weights_are_one_and_cost_nothing(golden_policy, golden_batch):
    def refused(*_):
        raise AssertionError("a forward pass")

    hook = golden_policy.decoder.register_forward_pre_hook(refused)
    try:
        weights = RLSD()(golden_policy, in_groups(golden_batch), context(step=50))
    finally:
        hook.remove()
    assert torch.equal(weights.values.bool(), golden_batch.response_mask)
    assert weights.values.max() == 1


def test_the_teacher_lags_until_it_is_refreshed(golden_policy, golden_batch):
    policy, batch, credit = copy.deepcopy(golden_policy), in_groups(golden_batch), RLSD(refresh_steps=4)
    before = copy.deepcopy(policy)
    first = credit(policy, batch, context(step=0)).scores
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    after = {name: p.clone() for name, p in policy.named_parameters()}
    lagging = credit(policy, batch, context(step=3))
    expected = _by_hand(before, policy, batch, 1, 0.5 * 47 / 50, 1.0, credit.sentence)
    assert lagging.values[1, : len(expected)].tolist() == near(expected, 100, torch.float32)
    assert all(torch.equal(after[name], p) for name, p in policy.named_parameters()), "the policy itself is untouched"
    refreshed = credit(policy, batch, context(step=4)).scores
    current = RLSD(refresh_steps=1)(policy, batch, context(step=4)).scores
    torch.testing.assert_close(refreshed, current)
    assert (refreshed - lagging.scores).abs().max() > 1e-3
    assert (refreshed - first).abs().max() > 1e-3


def test_a_checkpoint_without_a_teacher_begins_with_a_copy(golden_policy, golden_batch):
    credit, batch = RLSD(refresh_steps=4), in_groups(golden_batch)
    credit.load_state_dict({})
    found = credit(golden_policy, batch, context(step=6)).scores
    torch.testing.assert_close(found, RLSD(refresh_steps=1)(golden_policy, batch, context(step=6)).scores)


def test_the_sentence_is_appended_to_the_last_user_turn():
    assert with_sentence("Compute 1+1.\n", "It is 2.") == "Compute 1+1. It is 2.\n"
    turns = [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "So"},
    ]
    shown = with_sentence(turns, "It is 2.")
    assert [turn["content"] for turn in shown] == ["Think.", "1+1? It is 2.", "So"]
    assert turns[1]["content"] == "1+1?", "the prompt itself is untouched"

"""Methods that read the policy's distribution, each against loops over the model's own logits, one row at a time."""

import copy
import itertools
import math

import pytest
import torch

from grail_lightning.core.credit.base import token_advantages
from grail_lightning.credit import DGPO, RLSD, UCAS, AdvantageReweighting, HighEntropy, OptimalBaseline
from grail_lightning.gallery.distillation import with_sentence
from tests.core.credit.rollouts import context, no_pass, row_logits
from tests.tolerance import near

TEMPERATURE = 0.7
REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.5, 0.5, 2.0])


def _scaled(policy, batch, row):
    """The logits of each token of a row at the sampling temperature, and the token."""
    return zip(row_logits(policy, batch, row) / TEMPERATURE, batch.response_ids[row].tolist(), strict=False)


def _assert_rows(found, expected, number, scale=0.0):
    """Rows ``[B, T]`` are those of the lists, and padding is 0."""
    for row, values in enumerate(expected):
        assert found[row, : len(values)].tolist() == near(values, number, torch.float32, scale)
        assert (found[row, len(values) :] == 0).all()


def _entropy(logits):
    return -sum(p * math.log(p) for p in torch.softmax(logits, -1).tolist() if p)


def test_high_entropy_keeps_the_top_fifth_of_the_batch(golden_policy, batch):
    weights = HighEntropy()(golden_policy, batch, context(temperature=TEMPERATURE))
    rows = [[_entropy(z) for z, _ in _scaled(golden_policy, batch, row)] for row in range(6)]
    everything = sorted(h for row in rows for h in row)
    place = 0.8 * (len(everything) - 1)
    below = everything[int(place)]
    threshold = below + (everything[int(place) + 1] - below) * (place - int(place))
    _assert_rows(weights.values, [[float(h >= threshold) for h in row] for row in rows], 0)
    _assert_rows(weights.scores, rows, 100)
    assert weights.values.sum().item() / len(everything) == pytest.approx(0.2, abs=2 / len(everything))
    everywhere = HighEntropy(share=1.0)(golden_policy, batch, context()).values
    assert torch.equal(everywhere.bool(), batch.response_mask)


def test_reweighting_grows_with_the_tokens_probability(golden_policy, batch):
    found = AdvantageReweighting()(golden_policy, batch, context(temperature=TEMPERATURE)).values
    expected = [
        [0.2 * torch.softmax(z, -1)[token].item() + 0.8 for z, token in _scaled(golden_policy, batch, row)]
        for row in range(5)
    ]
    _assert_rows(found, [*expected, [1.0] * int(batch.response_lengths[5])], 16)  # The last row has no advantage.
    weighed = found[:5][batch.response_mask[:5]]
    assert 0.8 < weighed.min() < weighed.max() < 1  # From an impossible token to a certain one.


def test_the_optimal_baseline_weighs_rows_by_the_energy_of_their_gradient(golden_policy, batch):
    batch = batch.replace(rewards=REWARDS)
    sums, expected = [], []
    for row in range(6):
        probabilities = [(torch.softmax(z, -1), token) for z, token in _scaled(golden_policy, batch, row)]
        sums.append([*itertools.accumulate((1 - 2 * p[token] + (p * p).sum()).item() for p, token in probabilities)])
    for row, own in enumerate(sums):
        line = []
        for t in range(len(own)):
            there = [j for j in range(6) if batch.group[j] == batch.group[row] and t < len(sums[j])]
            baseline = sum(REWARDS[j].item() * sums[j][t] for j in there) / sum(sums[j][t] for j in there)
            line.append(REWARDS[row].item() - (0.0 if len(there) == 1 else baseline))
        expected.append(line)
    weights = OptimalBaseline()(golden_policy, batch, context(temperature=TEMPERATURE))
    _assert_rows(token_advantages(batch.advantages, weights), expected, 1000, 1.0)
    assert any(line[-1] == REWARDS[row].item() != 0 for row, line in enumerate(expected)), "one row alone at the end"
    dead = batch.replace(advantages=batch.advantages * torch.tensor([0, 0, 0, 1, 1, 1]))
    found = OptimalBaseline()(golden_policy, dead, context(temperature=TEMPERATURE)).additive
    assert (found[:3] == 0).all(), "a group without an advantage has none"
    assert torch.equal(found[3:], weights.additive[3:])


# --- UCAS -------------------------------------------------------------------------------------------------------------


def _ucas(policy, batch, standardise):
    """The token advantages of the formula, as lists."""
    sums, logits = [], []
    for row in range(len(batch)):
        pairs = list(_scaled(policy, batch, row))
        sums.append(sum((z.logsumexp(-1) - z.mean()).item() for z, _ in pairs))
        logits.append([(z[token] * TEMPERATURE).item() for z, token in pairs])
    low, high = min(min(own) for own in logits), max(max(own) for own in logits)
    result = []
    for row, own in enumerate(logits):
        members = [s for s, g in zip(sums, batch.group.tolist(), strict=True) if g == batch.group[row]]
        mean = sum(members) / len(members)
        std = math.sqrt(sum((s - mean) ** 2 for s in members) / (len(members) - 1))
        sure = (sums[row] - mean) / (std + 1e-6) if standardise else sums[row] - mean
        advantage = batch.advantages[row].item()
        shaped = advantage * math.exp(-0.25 * sure if advantage > 0 else 0.35 * sure)
        lowered = [shaped - 0.05 * (u - low) / (high - low) for u in own]
        result.append([max(a, 0.0) if shaped > 0 else a for a in lowered])
    return result


def test_ucas_lowers_advantages_by_certainty(golden_policy, batch):
    advantages = batch.advantages.clone()
    advantages[0] = 0.03  # small enough for the floor
    batch = batch.replace(advantages=advantages)
    weights = UCAS()(golden_policy, batch, context(temperature=TEMPERATURE))
    found = token_advantages(batch.advantages, weights)
    _assert_rows(found, _ucas(golden_policy, batch, standardise=True), 100, 0.01)
    first = found[0][batch.response_mask[0]]
    assert 0 < (first == 0).sum() < len(first), "the floor is exact, and not everywhere"
    assert found[5].min() < 0, "no advantage: the second stage alone"


def test_only_the_centred_certainty_of_ucas_is_clamped_in_the_exponent(golden_policy, batch):
    """Two rows of nearly the same certainty, so that the formula itself is within the limit."""
    batch = batch.select(torch.tensor([1, 1, 0, 3])).replace(
        group=torch.tensor([0, 0, 1, 1]), row=torch.arange(4), advantages=torch.tensor([1.0, -1.0, 1.0, -1.0])
    )
    weights = UCAS(standardise=False)(golden_policy, batch, context(temperature=TEMPERATURE))
    found = token_advantages(batch.advantages, weights)
    _assert_rows(found[:2], _ucas(golden_policy, batch, standardise=False)[:2], 100, 0.01)
    sums = weights.scores[2:].sum(1)
    assert (sums[0] - sums[1]).abs() / 2 * 0.25 > 20, "far beyond the limit"
    # C is c for row 2 and −c for row 3, so that both exponents, −0.25·c and 0.35·(−c), have the sign of −c.
    limit = math.exp(-20 if sums[0] > sums[1] else 20)
    assert weights.values[2:].amax(1).tolist() == pytest.approx([limit, limit])
    assert weights.values.isfinite().all()


# --- DGPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 0.0])
def test_dgpo_is_a_softmax_of_distance_times_entropy(power, golden_policy, reference, batch):
    given = context(temperature=TEMPERATURE, reference=reference)
    expected = []
    for row in range(5):
        powers = []
        for (own, _), (other, _) in zip(
            _scaled(golden_policy, batch, row), _scaled(reference, batch, row), strict=True
        ):
            overlap = (torch.softmax(own, -1) * torch.softmax(other, -1)).sqrt().sum().item()
            entropy = _entropy(own) / math.log(len(own))
            powers.append(math.exp((1 - overlap) * entropy**power / 0.1))
        expected.append([len(powers) * x / sum(powers) for x in powers])
        assert max(expected[-1]) > 1.05
    found = DGPO(entropy_power=power, temperature=0.1)(golden_policy, batch, given).values
    _assert_rows(found, [*expected, [1.0] * int(batch.response_lengths[5])], 300, 2.0)


# --- RLSD -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _logprobs(policy, prompt, response, temperature):
    ids = [*policy.tokenizer(prompt)["input_ids"], *response]
    logits = policy.model(torch.tensor([ids]), use_cache=False).logits[0].double() / temperature
    start = len(ids) - len(response)
    return [logits[start + t - 1].log_softmax(0)[token].item() for t, token in enumerate(response)]


def _rlsd(teacher, student, batch, row, share, temperature, sentence):
    """The weights of one row."""
    response = batch.response_ids[row, : int(batch.response_lengths[row])].tolist()
    prompt = batch.prompts[row].messages
    shown = prompt.removesuffix("\n") + " " + sentence.replace("{answer}", str(10 * row)) + "\n"
    sign = math.copysign(1, batch.advantages[row].item())
    gaps = zip(
        _logprobs(teacher, shown, response, temperature), _logprobs(student, prompt, response, temperature), strict=True
    )
    return [1 - share + share * min(max(math.exp(sign * (t - s)), 0.8), 1.2) for t, s in gaps]


@pytest.mark.parametrize("sentence", ["The correct answer is {answer}.", r"($\frac{{answer}}{1}$)"])
def test_rlsd_compares_the_policy_with_itself_when_it_is_shown_the_answer(sentence, golden_policy, batch):
    # Step 20 of 50: λ = 0.5 · 0.6 = 0.3.
    found = RLSD(sentence=sentence)(golden_policy, batch, context(step=20, temperature=TEMPERATURE)).values
    expected = [_rlsd(golden_policy, golden_policy, batch, row, 0.3, TEMPERATURE, sentence) for row in range(5)]
    _assert_rows(found, [*expected, [1.0] * int(batch.response_lengths[5])], 100)
    assert found[:5][batch.response_mask[:5]].unique().numel() > 20, "not all of them are clipped"
    with no_pass(golden_policy):  # The decay is over.
        weights = RLSD(sentence=sentence)(golden_policy, batch, context(step=50))
    assert torch.equal(weights.values, batch.response_mask.float())


def test_the_teacher_of_rlsd_lags_until_it_is_refreshed(golden_policy, batch):
    policy, credit = copy.deepcopy(golden_policy), RLSD(refresh_steps=4)
    credit.load_state_dict({})  # A checkpoint without a teacher: it begins with a copy.
    before = copy.deepcopy(policy)
    first = credit(policy, batch, context(step=0)).scores
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    after = {name: p.clone() for name, p in policy.named_parameters()}
    lagging = credit(policy, batch, context(step=3))
    expected = _rlsd(before, policy, batch, 1, 0.5 * 47 / 50, 1.0, credit.sentence)
    assert lagging.values[1, : len(expected)].tolist() == near(expected, 100, torch.float32)
    assert all(torch.equal(after[name], p) for name, p in policy.named_parameters()), "the policy itself is untouched"
    refreshed = credit(policy, batch, context(step=4)).scores
    torch.testing.assert_close(refreshed, RLSD(refresh_steps=1)(policy, batch, context(step=4)).scores)
    assert min((refreshed - old).abs().max() for old in (lagging.scores, first)) > 1e-3


def test_the_sentence_is_appended_to_the_last_user_turn():
    assert with_sentence("Compute 1+1.\n", "It is 2.") == "Compute 1+1. It is 2.\n"
    turns = [{"role": role, "content": text} for role, text in (("system", "Think."), ("user", "1+1?"), ("tool", "So"))]
    shown = with_sentence(turns, "It is 2.")
    assert [turn["content"] for turn in shown] == ["Think.", "1+1? It is 2.", "So"]
    assert turns[1]["content"] == "1+1?", "the prompt itself is untouched"

"""Credit for turns, by examples small enough for a sheet of paper; `test_contract` has what holds for every method."""

import math
from itertools import pairwise

import pytest
import torch

from grail_lightning.core.credit.base import token_advantages
from grail_lightning.credit import IGPO, GiGPO, OptimalBaseline, TreeAdvantage, TurnRewards
from tests.core.credit.episodes import Row, by_turn, flat, played
from tests.core.credit.rollouts import context, no_pass, row_logits
from tests.tolerance import near

# Returns at a discount of 1/2, and the states in which turns begin; row 2 comes back to A.
#   row 0: A 0.5,  B 1            A: (0.5 + 0 + 0.25 + 1) / 4 = 0.4375
#   row 1: A 0,    C 0,   B 0     B: (1 + 0 + 0.5) / 3 = 0.5
#   row 2: A 0.25, B 0.5, A 1     C: one turn alone
GROUP = [
    Row(1.0, [[1, 2], [3]], [[9]], ["A", "B"]),
    Row(0.0, [[1], [4, 4], [5]], [[9, 9], [8]], ["A", "C", "B"]),
    Row(1.0, [[1, 2], [6], [7, 7, 7]], [[9], [8]], ["A", "B", "A"]),
]
# The same states in another group are other states; its rewards are equal, and so are all returns of a state.
OTHER = [Row(0.1, [[1], [3]], [[9]], ["A", "B"]) for _ in range(3)]
# Turns whose gains, scores and states differ, with a rollout of one turn.
MIXED = [
    Row(1.0, [[11, 12], [13, 14], [15]], [[9, 8], [7]], scores=[1.0, -0.5, None]),
    Row(0.0, [[11, 12], [16]], [[9, 8]], scores=[0.5]),
    Row(0.5, [[17, 18, 19]]),
]


# --- GiGPO ------------------------------------------------------------------------------------------------------------


def test_gigpo_compares_the_returns_of_turns_that_began_in_one_state(golden_policy):
    batch = played(GROUP, OTHER)
    weights = GiGPO(omega=2.0, discount=0.5)(golden_policy, batch, context())
    expected = [
        [2 * (0.5 - 0.4375), 2 * (1 - 0.5)],
        [2 * (0 - 0.4375), 0.0, 2 * (0 - 0.5)],
        [2 * (0.25 - 0.4375), 0.0, 2 * (1 - 0.4375)],
        *[[0.0, 0.0]] * 3,
    ]
    assert flat(by_turn(batch, weights.additive)) == near(flat(expected), 8, torch.float32)
    assert (weights.additive[3:] == 0).all(), "a rounding error of 0.1 is no advantage"
    assert torch.equal(weights.values, batch.response_mask.float()), "beside the advantage of the rollout"
    # All but C are states of another rollout: 7 of 8, and 6 of 6.
    assert weights.metrics["shared_states"] == (13, 14)


def test_gigpo_divides_by_the_deviation_of_the_state_and_adds_scores_where_asked(golden_policy):
    batch = played(GROUP)
    std = {"A": torch.tensor([0.5, 0.0, 0.25, 1.0]).std().item(), "B": torch.tensor([1.0, 0.0, 0.5]).std().item()}
    found = by_turn(batch, GiGPO(discount=0.5, standardise=True)(golden_policy, batch, context()).additive)
    assert found[0] == near([0.0625 / (std["A"] + 1e-4), 0.5 / (std["B"] + 1e-4)], 16, torch.float32)
    assert found[1][1] == 0, "C has no deviation"
    # Scores 0.5 and none of row 1 make its returns A 0.5, C 0, B 0; the mean of A is then (0.5 + 0.5 + 0.25 + 1) / 4.
    scored = played([GROUP[0], GROUP[1]._replace(scores=[0.5]), GROUP[2]])
    found = by_turn(scored, GiGPO(discount=0.5, scores=True)(golden_policy, scored, context()).additive)
    assert found[1] == near([0.5 - 0.5625, 0.0, -0.5], 8, torch.float32)


def test_without_keys_the_ids_so_far_are_the_state(golden_policy):
    rows = [row._replace(states=[]) for row in GROUP]
    batch = played(rows)
    weights = GiGPO(omega=1.0, discount=1.0)(golden_policy, batch, context())
    # Rows 0 and 2 have 1 2 | 9 before their second turns, row 1 has 1 | 9 9. All begin in one state.
    # Returns are the rewards 1, 0, 1: their mean is 2/3 in the first state, and 1 in that of rows 0 and 2.
    expected = [[1 / 3, 0.0], [-2 / 3, 0.0, 0.0], [1 / 3, 0.0, 0.0]]
    assert flat(by_turn(batch, weights.additive)) == near(flat(expected), 8, torch.float32)
    assert weights.metrics["shared_states"] == (5, 8)


# --- scores of turns --------------------------------------------------------------------------------------------------


def test_turn_rewards_are_returns_beside_those_of_the_group(golden_policy):
    batch = played(MIXED)
    weights = TurnRewards(discount=0.5, baseline="group")(golden_policy, batch, context())
    # Rewards 1, −0.5, 1 | 0.5, 0 | 0.5; returns 1 − 0.25 + 0.25 = 1, −0.5 + 0.5 = 0, 1 | 0.5, 0 | 0.5; their mean 0.5.
    assert by_turn(batch, weights.additive) == [[0.5, -0.5, 0.5], [0.0, -0.5], [0.0]]
    assert (weights.values == 0).all()
    assert weights.metrics == {"scored_turns": (3, 6), "turn_score": (1, 3)}
    # By number of the turn: 1, 0.5, 0.5 | 0, 0 | 1.
    found = by_turn(batch, TurnRewards(discount=0.5)(golden_policy, batch, context()).additive)
    assert flat(found) == near([1 / 3, 0, 0, -1 / 6, 0, -1 / 6], 8, torch.float32)


# --- IGPO -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _mean_logprob(policy, before, text):
    """Of the answer after some ids, by the whole model, unpadded."""
    lead, answer = (policy.tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("<answer>", text))
    ids = torch.tensor([*before, *lead, *answer])
    logps = policy.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
    places = range(len(before) + len(lead), len(ids))
    return sum(logps[t - 1, ids[t]].item() for t in places) / len(answer)


def _beliefs(policy, batch, row, reference):
    ids = batch.input_ids[row][batch.attention_mask[row]].tolist()
    numbers = batch.turn[row].masked_fill(~batch.response_mask[row], -1).tolist()
    starts = [3 + numbers.index(k) for k in range(max(numbers) + 1)]
    return [_mean_logprob(policy, ids[:start], reference) for start in starts]


@pytest.mark.parametrize("normalise", ["joint", "separate"])
def test_igpo_rewards_the_rise_of_the_probability_of_the_answer(normalise, golden_policy):
    batch, references = played(MIXED, GROUP, references=["12", "345"]), ["12"] * 3 + ["345"] * 3
    found = IGPO(discount=0.5, normalise=normalise)(golden_policy, batch, context())
    rewards, outcomes = [], []
    for row, reference in enumerate(references):
        levels = [math.exp(level) for level in _beliefs(golden_policy, batch, row, reference)]
        gains = [after - before for before, after in pairwise(levels)]
        rewards.append([*gains, batch.rewards[row].item()])
        outcomes.append([False] * len(gains) + [True])
    expected = []
    for row in range(6):
        of_group = slice(row // 3 * 3, row // 3 * 3 + 3)
        pairs = [*zip(flat(rewards[of_group]), flat(outcomes[of_group]), strict=True)]
        scaled = []
        for value, last in zip(rewards[row], outcomes[row], strict=True):
            chosen = [v for v, o in pairs if normalise == "joint" or o == last]
            others = torch.tensor(chosen, dtype=torch.float64)
            scaled.append(((value - others.mean()) / (others.std() + 1e-4)).item())
        expected += [sum(0.5 ** (m - k) * scaled[m] for m in range(k, len(scaled))) for k in range(len(scaled))]
    assert flat(by_turn(batch, found.additive)) == near(expected, 300, torch.float32, 1.0)
    gains = [v for row in rewards for v in row[:-1]]
    assert found.metrics["information_gain"] == near([sum(gains), len(gains)], 300, torch.float32, 1.0)
    assert (found.values == 0).all()
    assert not found.fallback.any()


def test_igpo_of_equal_rewards_still_tells_turns_apart_and_of_one_turn_takes_no_pass(golden_policy):
    equal = played([row._replace(reward=1.0) for row in MIXED])
    assert by_turn(equal, IGPO()(golden_policy, equal, context()).additive)[0][0] != 0
    single = played(MIXED).replace(turn=None, episodes=None)
    with no_pass(golden_policy):
        weights = IGPO()(golden_policy, single, context())
    # Rewards 1, 0, 0.5: centred 0.5, −0.5, 0 over a deviation of 0.5.
    assert weights.additive[:, 0].tolist() == near([0.5 / 0.5001, -0.5 / 0.5001, 0.0], 8, torch.float32)


def test_rollouts_without_a_reference_answer_keep_their_advantage_under_igpo(golden_policy):
    batch = played(MIXED, MIXED, references=["", "12"])
    weights = IGPO()(golden_policy, batch, context())
    assert weights.fallback.tolist() == [True, True, False, False, False, False], "one turn needs no answer"
    kept = token_advantages(batch.advantages, weights)[:2]
    assert torch.equal(kept, batch.advantages[:2, None] * batch.response_mask[:2])


# --- trees and baselines over turns -----------------------------------------------------------------------------------


def test_the_tree_over_turns_adds_the_change_of_value_of_each_turn(golden_policy):
    batch = played(GROUP)
    weights = TreeAdvantage(state="turns")(golden_policy, batch, context())
    # V(A) = (1 + 0 + 1) / 3, V(B) = 2/3, V(C) = 0; a row counts once in a state.
    a, b, c = 2 / 3, 2 / 3, 0.0
    expected = [[b - a, 1 - b], [c - a, b - c, 0 - b], [b - a, a - b, 1 - a]]
    assert flat(by_turn(batch, weights.additive)) == near(flat(expected), 8, torch.float32, 1.0)
    assert weights.metrics["in_tree"] == (7, 8)
    stays = played([GROUP[0]._replace(states=["A", "A"]), *GROUP[1:]])
    found = by_turn(stays, TreeAdvantage(state="turns")(golden_policy, stays, context()).additive)
    assert found[0] == near([0, 1 - 2 / 3], 8, torch.float32, 1.0), "a turn that changes nothing has no change"


def test_the_optimal_baseline_of_a_turn_weighs_rows_by_their_energy_up_to_its_end(golden_policy):
    batch = played(MIXED)
    one = OptimalBaseline(unit="turn")(golden_policy, batch, context())
    energy = torch.zeros(3, 3, dtype=torch.float64)
    for row in range(3):
        pi = row_logits(golden_policy, batch, row).softmax(-1)
        for t in batch.response_mask[row].nonzero().flatten().tolist():
            energy[row, batch.turn[row, t]] += 1 - 2 * pi[t, batch.response_ids[row, t]] + pi[t].square().sum()
    total = energy.cumsum(1)
    first = (total[:, 0] * batch.rewards).sum() / total[:, 0].sum()
    second = total[0, 1] / (total[0, 1] + total[1, 1])  # Rewards 1 and 0.
    expected = [1 - first, 1 - second, 1.0, 0 - first, 0 - second, 0.5 - first]
    assert flat(by_turn(batch, one.additive)) == near([float(e) for e in expected], 300, torch.float32, 1.0)

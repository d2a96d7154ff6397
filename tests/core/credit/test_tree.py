"""Credit from prefix trees and other states, against loops over the texts themselves."""

import re

import pytest
import torch

from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.credit.tree import numbers
from grail_lightning.credit import PrefixWeights, TreeAdvantage
from tests.core.credit.groups import GROUP, LATE, OTHER, SOUND, groups, sharing, tokens_of
from tests.core.credit.rollouts import context
from tests.steps import update_of


@pytest.fixture(scope="module")
def batch(arithmetic):
    return groups(arithmetic, GROUP, OTHER)


def _values(batch, row, outcomes, own_row, shrinkage):
    """V before the first token and after each, from texts."""
    values = []
    for length in range(len(tokens_of(batch, row)) + 1):
        others = [j for j in sharing(batch, row, length) if own_row or j != row]
        total = sum(outcomes[j] for j in others)
        weight = 0 if own_row or not length else shrinkage
        values.append((total + weight * values[-1] if weight else total) / (len(others) + weight))
    return values


@pytest.mark.parametrize("options", [{}, {"own_row": False}, {"own_row": False, "shrinkage": 0.5, "scale": 2.0}])
def test_advantages_are_those_of_a_loop_over_the_prefixes(options, arithmetic, batch):
    batch = batch.replace(rewards=batch.rewards * 0.7 - torch.arange(8) % 3 * 0.1)
    weights = TreeAdvantage(**options)(arithmetic, batch, context())
    found = token_advantages(batch.advantages, weights)
    outcomes = batch.rewards.tolist()
    for row in range(len(batch)):
        v = _values(batch, row, outcomes, options.get("own_row", True), options.get("shrinkage", 1.0))
        scale = options.get("scale", 1.0)
        expected = [batch.advantages[row].item() + scale * (v[t + 1] - v[t]) for t in range(len(v) - 1)]
        # Changes of at most 1e-6 count as rounding errors, before they are scaled.
        assert found[row, : len(expected)].tolist() == pytest.approx(expected, abs=1.2e-6 * scale)
        assert (found[row, len(expected) :] == 0).all()
    shared = sum(len(sharing(batch, r, t + 1)) > 1 for r in range(8) for t in range(len(tokens_of(batch, r))))
    assert weights.metrics["in_tree"] == (shared, int(batch.response_mask.sum()))


def test_a_group_of_equal_outcomes_has_no_terms_and_is_not_run(arithmetic):
    dead = groups(arithmetic, GROUP, OTHER, rewards=[0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0])
    weights = TreeAdvantage()(arithmetic, dead, context())
    assert (weights.additive[:4] == 0).all()
    assert (weights.additive[4:] != 0).any(1).all()
    plan = update_of(arithmetic, dead, weights)
    assert plan.live.tolist() == [False] * 4 + [True] * 4


def test_terms_can_be_standardised_and_stand_alone(arithmetic, batch):
    plain = TreeAdvantage()(arithmetic, batch, context())
    alone = TreeAdvantage(advantage=False)(arithmetic, batch, context())
    assert (alone.values == 0).all()
    assert torch.equal(alone.additive, plain.additive)
    scaled = TreeAdvantage(standardise=True)(arithmetic, batch, context())
    for group in (slice(0, 4), slice(4, 8)):
        std = batch.rewards[group].double().std().item()
        torch.testing.assert_close(scaled.additive[group], (plain.additive[group].double() / (std + 1e-4)).float())


def test_prefix_weights_are_one_over_the_rows_that_share(arithmetic, batch):
    weights = PrefixWeights()(arithmetic, batch, context()).values
    for row in range(len(batch)):
        expected = [1 / len(sharing(batch, row, t + 1)) for t in range(len(tokens_of(batch, row)))]
        assert weights[row, : len(expected)].tolist() == pytest.approx(expected)


# --- other states -----------------------------------------------------------------------------------------------------


def test_numbers_are_complete_when_the_next_character_is_read():
    marks = numbers("7+5=12\n12-3.5=8.5")
    assert [stop for stop, _ in marks] == [2, 4, 7, 14], "12 again is no new number, and 8.5 may go on"
    assert len({key for _, key in marks}) == 4
    assert numbers("5+7=12\n")[-1][1] == numbers("7+5=12\n")[-1][1], "a set has no order"
    assert numbers("5+7=12\n")[-1][1] != numbers("5+7=13\n")[-1][1]
    assert numbers("nothing") == []


def _sets(text):
    """After how many characters which set of numbers is complete."""
    found, marks = frozenset(), [(0, frozenset())]
    for stop in range(1, len(text) + 1):
        complete = re.findall(r"[0-9]+(?=[^0-9])", text[:stop])
        if frozenset(complete) != found:
            found = frozenset(complete)
            marks.append((stop, found))
    return marks


@pytest.mark.parametrize("own_row", [True, False])
def test_a_segment_between_two_sets_of_numbers_gets_their_difference(own_row, arithmetic):
    """Row 1 finds its way back: after `2+10=12` it has 7, 5, 2, 10 and 12, which nobody else has."""
    swapped = "5+7=12\n12-3=9\n9+8=17\n\\boxed{17}"
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, "7+5=2\n2+10=12\n\\boxed{12}", LATE, swapped]))
    weights = TreeAdvantage(state="numbers", own_row=own_row)(arithmetic, batch, context())
    sets, outcomes = [_sets(text) for text in batch.texts], batch.rewards.tolist()
    for row, text in enumerate(batch.texts):
        values = []
        for _, state in sets[row]:
            others = [j for j in range(4) if state in [s for _, s in sets[j]] and (own_row or j != row)]
            weight = 0 if own_row or not values else 1
            before = values[-1] if values else 0.0
            total = sum(outcomes[j] for j in others)
            values.append((total + weight * before) / (len(others) + weight))
        expected = []
        for (start, _), (stop, _), here, there in zip(sets[row], sets[row][1:], values, values[1:], strict=False):
            expected += [there - here] * (stop - start)
        expected += [outcomes[row] - values[-1]] * (len(text) + 1 - len(expected))
        found = weights.additive[row][batch.response_mask[row]].tolist()
        assert found == pytest.approx(_spread(expected, arithmetic, text), abs=1.2e-6)


def _spread(of_characters, policy, text):
    """A figure of each character as one of each token: that of its last character; the end token has the last one."""
    figures, place = [], 0
    for token in policy.tokenizer(text)["input_ids"]:
        place += len(policy.tokenizer.decode([token]))
        figures.append(of_characters[place - 1])
    return [*figures, of_characters[-1]]

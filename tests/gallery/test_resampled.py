"""Resampled credit: its searches against tables of values, its borders, and continuations of the packaged policy."""

import math

import pytest
import torch

from grail_lightning import HFEngine
from grail_lightning.answers import Verifier
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.step.sampler import Sampler
from grail_lightning.credit import Resampled, SampledContinuations
from grail_lightning.gallery.continuations import Prefix
from grail_lightning.gallery.resampled import find_borders
from tests.batches import rollouts
from tests.core.credit.rollouts import context
from tests.runs import SAMPLING, Watch, batches, module, problems, sampled, trainer


class Table(SampledContinuations):
    """Continuations whose mean outcome at each place is given; it counts what is asked."""

    def __init__(self, values, tokens=1):
        self.values, self.tokens, self.asked = values, tokens, []

    def draw(self, batch, places, number, budget):
        self.asked.append(list(places))
        found, spent = [], 0
        for place in places:
            if spent + self.tokens * number > budget:
                found.append(None)
                continue
            spent += self.tokens * number
            right = round(self.values(place) * number)
            found.append([1.0] * right + [0.0] * (number - right))
        return found, spent


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").eval()


@pytest.fixture(scope="module")
def batch(policy):
    """Two groups of four rollouts of the packaged policy; the first of each is counted as right."""
    made = sampled(policy, problems(2), 4, SAMPLING, seed=3)
    return rollouts(made, torch.tensor([1.0, 0.0, 0.0, 0.0] * 2), tokenizer=policy.tokenizer)


def _borders(policy, batch):
    return find_borders(policy, batch, list(range(len(batch))))


def test_steps_are_those_that_the_task_labels_or_else_lines(policy, batch, monkeypatch):
    def beginnings(places, row):
        return [policy.tokenizer.decode(batch.response_ids[row, :place]) for place in places]

    for row, places in enumerate(_borders(policy, batch)):
        steps = batch.prompts[row].task.label_steps(batch.texts[row], batch.prompts[row])
        texts = beginnings(places, row)
        assert texts == [batch.texts[row][: step.stop] for step in steps][: len(texts)]
        assert len(texts) >= len(steps) - 1
    monkeypatch.setattr(type(batch.prompts[0].task), "label_steps", lambda *_: None)
    for row, places in zip((5, 0, 2), find_borders(policy, batch, [5, 0, 2]), strict=True):
        text = policy.tokenizer.decode(batch.response_ids[row][batch.response_mask[row]][:-1])
        ends = [place + 1 for place, character in enumerate(text) if character == "\n"]
        assert beginnings(places, row) == [text[:end] for end in ends]


def test_everywhere_adds_the_change_of_each_step(policy, batch):
    """Row 1 is wrong; its group has 1 of 4 right. The value at a border is 1 over the number of kept tokens."""
    source = Table(lambda place: 1 / place.length)
    made = Resampled(512, search="everywhere")(policy, batch, context(continuations=source))
    for row in (1, 2, 3, 5, 6, 7):
        places = _borders(policy, batch)[row]
        values = [0.25, *(round(512 / p) / 512 for p in places), 0.0]
        borders = [0, *places, int(batch.response_lengths[row])]
        expected = []
        for k in range(len(borders) - 1):
            expected += [values[k + 1] - values[k]] * (borders[k + 1] - borders[k])
        assert made.additive[row, : len(expected)].tolist() == pytest.approx(expected)
    assert (made.additive[[0, 4]] == 0).all(), "right rollouts are outside the gate"
    assert torch.equal(made.values, batch.response_mask.to(made.values.dtype))
    assert len(source.asked) == 1


@pytest.mark.parametrize("fatal", [1, 2, 3])
@pytest.mark.parametrize("right", [False, True])
def test_bisection_finds_the_first_border_behind_which_the_outcome_is_decided(right, fatal, policy, batch):
    """In wrong rollouts success is lost there, in right ones it is sure; the group's mean is 1/4."""
    places = _borders(policy, batch)
    decided, change = (1.0, 0.75) if right else (0.0, -0.25)
    source = Table(lambda place: 0.25 if place.length < places[place.row][fatal - 1] else decided)
    gate = "positive" if right else "negative"
    made = Resampled(8, advantage=False, gate=gate)(policy, batch, context(continuations=source))
    inside = (0, 4) if right else (1, 2, 3, 5, 6, 7)
    for row in inside:
        borders = [0, *places[row], int(batch.response_lengths[row])]
        expected = [0.0] * borders[fatal - 1] + [change] * (borders[fatal] - borders[fatal - 1])
        expected += [0.0] * (borders[-1] - borders[fatal])
        assert made.additive[row, : len(expected)].tolist() == expected
        assert (made.values[row] == 0).all(), "without the group's advantage the change is the whole one"
        asked = [p for call in source.asked for p in call if p.row == row]
        assert len(asked) <= math.ceil(math.log2(len(borders) - 1))
    assert {p.row for call in source.asked for p in call} <= set(inside)


def test_rollouts_that_the_budget_does_not_reach_fall_back(policy, batch):
    source = Table(lambda place: 0.0, tokens=10)
    made = Resampled(8, search="everywhere", budget=1000)(policy, batch, context(continuations=source))
    assert made.fallback.any()
    assert not made.fallback.all()
    assert (made.additive[made.fallback] == 0).all()
    assert (made.values[made.fallback] == batch.response_mask[made.fallback]).all()
    assert made.metrics["continued_tokens"] <= 1000


# --- continuations of the real policy ---------------------------------------------------------------------------------


def continuations(policy, engine, verifier):
    """Continuations as training samples them."""
    how = {"group_size": 4, "sampling": SAMPLING, "clock": PhaseClock(policy.device), "rank": 0}
    sampler = Sampler(policy=policy, engine=engine, verifier=verifier, **how)
    return SampledContinuations(lambda: sampler, lambda: 3)


@pytest.fixture(scope="module")
def source(policy):
    with Verifier(num_workers=1) as verifier:
        yield lambda engine=None: continuations(policy, engine or HFEngine(), verifier)


PLACES = [Prefix(1, 6), Prefix(2, 12), Prefix(5, 6), Prefix(7, 20)]


def test_a_continuation_depends_on_no_other_place_and_on_no_order(source, batch):
    whole, _ = source().draw(batch, PLACES, 2, 10_000)
    assert {len(one) for one in whole} == {2}
    assert source().draw(batch, PLACES[:1], 2, 10_000)[0] == whole[:1]
    order = torch.tensor([7, 5, 2, 1, 0])
    moved = [Prefix(order.tolist().index(row), length) for row, length in PLACES[::-1]]
    assert source(HFEngine(cache_tokens=200)).draw(batch.select(order), moved, 2, 10_000)[0] == whole[::-1]


def test_continuations_begin_with_the_kept_tokens_and_end_at_the_limit(policy, batch, source, monkeypatch):
    seen = []

    class Recorded(HFEngine):
        def generate_seeded(self, prompts, group_size, sampling, seeds):
            made = super().generate_seeded(prompts, group_size, sampling, seeds)
            seen.append((prompts, made))
            return made

    found, tokens = source(Recorded()).draw(batch, PLACES, 4, 10_000)
    assert sum(int(made.response_mask.sum()) for _, made in seen) == tokens
    prompts, made = seen[0]
    for prompt, (row, length) in zip(prompts, sorted(PLACES, key=lambda p: (p.length, p.row)), strict=True):
        own = batch.input_ids[row][batch.attention_mask[row]].tolist()
        assert list(prompt.messages.ids) == own[: len(own) - int(batch.response_lengths[row]) + length]
    assert int(made.response_lengths.max()) <= SAMPLING.max_response_length - 6
    # Graded as whole responses: the boxed answer of the text, compared with the row's reference.
    texts = [policy.tokenizer.decode(made.response_ids[k, : made.response_lengths[k]]) for k in range(4)]
    right = [f"boxed{{{batch.prompts[1].reference}}}" in text for text in texts]
    assert found[0] == [float(r) for r in right]


def test_the_budget_is_never_exceeded_and_the_latest_places_are_left_out(source, batch):
    whole, tokens = source().draw(batch, PLACES, 4, 10_000)
    most = 4 * (SAMPLING.max_response_length - 6)
    for budget in (most - 1, most, 2 * most):
        found, spent = source().draw(batch, PLACES, 4, budget)
        assert spent <= budget
        drawn = [k for k, one in enumerate(found) if one is not None]
        assert all(found[k] == whole[k] for k in drawn)
        assert (not drawn) == (budget < most)
    assert tokens > most / 4


def test_a_run_logs_what_it_cost():
    watch = Watch()
    trainer(1, watch).fit(module(credit=Resampled(2, budget=5_000)), batches(1, size=2))
    figures = watch.outputs[0].metrics
    assert 0 < figures["credit/continued_tokens"] <= 5_000
    assert 0 < figures["credit/divided"] <= 1

"""FinePO: scores of spans move the advantage of a rollout between them, in worked examples."""

import math

import pytest
import torch

from grail_lightning import EnvironmentTask, MathTask
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.credit import CriticSearch, GiGPO, Judge, PermutedRewards, ScoredSpan, SpanScores, TurnRewards
from grail_lightning.gallery.spans import _Span
from grail_lightning.worlds.code.python import Python
from grail_lightning.worlds.search.environment import Search
from tests.core.credit.episodes import Row, by_turn, played
from tests.core.credit.groups import FLAWED, SOUND, groups
from tests.core.credit.rollouts import context
from tests.gallery.test_critic import GROUP, served


def test_good_turns_of_right_rollouts_gain_and_bad_ones_of_wrong_rollouts_lose(golden_policy):
    batch = played(GROUP)
    weights = SpanScores(alpha=0.5)(golden_policy, batch, context())
    # Row 0: mean 2/3 (by length), so Δ = 1/3 and −2/3, over the largest 1 and −2. Row 2: mean 1.25, Δ = ∓0.75.
    found = by_turn(batch, weights.values)
    assert found[0] == pytest.approx([1.5, 0.0, 1.0], abs=1e-6)
    assert found[1] == [1.0, 1.0]  # A single score says nothing.
    assert found[2] == pytest.approx([1.5, 0.5, 1.0], abs=1e-6)  # Its advantage is negative.
    assert not weights.fallback.any()
    assert weights.metrics == {"clipped": (0.0, 6.0), "span_tokens": (6.0, 10.0)}
    # The advantage of each rollout is moved, not made.
    credit = token_advantages(batch.advantages, weights)
    assert credit.sum(1).tolist() == pytest.approx((batch.advantages * batch.response_mask.sum(1)).tolist())
    # The clip keeps signs, and its change is a figure: before it 3, 3 and −3 in row 0, 3 and −1 in row 2.
    clipped = SpanScores(alpha=2.0, beta=1.5)(golden_policy, batch, context())
    assert by_turn(batch, clipped.values) == [[1.5, 0.0, 1.0], [1.0, 1.0], [1.5, 0.0, 1.0]]
    assert clipped.metrics["clipped"] == (pytest.approx(2 * 1.5 + 3 + 1.5 + 1), 6)


@pytest.mark.parametrize("score", [0.1, 1e6 + 0.1, 123456789.1])
def test_equal_scores_say_nothing_however_large_they_are(score, golden_policy):
    batch = played([Row(float(k), [[11]] * 7, [[9]] * 6, scores=[score] * 7) for k in (0, 1)])
    assert by_turn(batch, SpanScores()(golden_policy, batch, context()).values) == [[1.0] * 7] * 2


def test_labelled_steps_are_spans_where_there_are_no_turns(arithmetic):
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, FLAWED, "no step at all"]))
    weights = SpanScores()(arithmetic, batch, context())
    assert torch.equal(weights.values[0], batch.response_mask[0].float())  # All steps are sound.
    values, flaw = weights.values[1].tolist(), FLAWED.index("2")
    assert values[flaw] == 2.0  # `clip(1 + …, 0, 2)`: the slip is blamed, and what was inherited from it is not.
    assert values[FLAWED.index("-1")] == pytest.approx(0, abs=1e-6)
    assert weights.fallback.tolist() == [False, False, True]


def _halves(text, prompt):
    assert prompt.reference == "17"
    middle = len(text) // 2
    return [ScoredSpan(middle, len(text), 0.0, "end"), ScoredSpan(0, middle, 1.0, "begin")]


def test_a_function_scores_ranges_of_characters(arithmetic):
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, FLAWED]))
    weights = SpanScores(scorer=_halves, alpha=0.5)(arithmetic, batch, context())
    middle = len(SOUND) // 2  # A token a character up to there.
    begin, end = weights.values[0, middle - 1].item(), weights.values[0, middle].item()
    assert begin > 1 > end
    assert weights.values[0].sum().item() == pytest.approx(batch.response_mask[0].sum().item())
    assert (weights.values[1, : len(FLAWED) // 2] < 1).all()


@pytest.mark.parametrize(
    "spans", [None, [1], [(0, 4, "x")], [(0, 4, 1.0), (2, 6, 0.0)], [(0, 400, 1.0)], [(0, 4, math.nan)]]
)
def test_spans_that_cannot_be_are_refused(spans, arithmetic):
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, FLAWED]))
    with pytest.raises(ValueError, match=r"`credit.scorer` must return `ScoredSpan\(start, stop, score\)`"):
        SpanScores(scorer=lambda text, prompt: spans)(arithmetic, batch, context())


def test_controls_keep_places_and_take_the_scores_of_the_rollout_or_group(golden_policy):
    many = [Row(float(k % 2), [[11]] * 7, [[9]] * 6, scores=[float(10 * k + j) for j in range(6)]) for k in range(4)]
    batch = played(many)

    def scores_of(kind):
        method = SpanScores(scores=kind)
        rescored = method._rescored(method._spans(golden_policy, batch), batch, context())
        return [[span.score for span in row] for row in rescored]

    given, permuted, drawn = map(scores_of, ("given", "permuted", "random"))
    assert [sorted(row) for row in permuted] == given
    assert permuted != given
    pool = {score for row in given for score in row}
    assert {score for row in drawn for score in row} <= pool
    assert any(set(row) - set(own) for row, own in zip(drawn, given, strict=True)), "from the whole group"


def test_a_frequent_kind_of_action_is_scored_lower_within_a_bound():
    """Within the group: in the second one there is one kind alone, which has its share."""
    rows = [[("a", 1.0), ("a", 1.0), ("b", 1.0)], [("a", 1.0)], [("a", 1.0)], *[[("b", 1.0)]] * 3]

    def spans(text, prompt):
        return [ScoredSpan(k, k + 1, score, kind) for k, (kind, score) in enumerate(rows[int(text[-1])])]

    batch = played(GROUP, GROUP)
    batch = batch.replace(texts=[f"aaa{row}" for row in range(6)], episodes=None, turn=None)
    method = SpanScores(scorer=spans, debias=0.5)
    given = [[_Span([k], score, kind) for k, (kind, score) in enumerate(row)] for row in rows]
    found = method._rescored(given, batch, context())
    # Four of five are of kind a; if the two kinds were as frequent, each had a half.
    assert all(span.score == 1 for row in found[3:] for span in row)
    changes = {span.kind: span.score - 1 for row in found[:3] for span in row}
    assert changes == {"a": pytest.approx(-0.5 * torch.tensor(8 / 5).log().item()), "b": pytest.approx(0.5 * 0.91629)}
    method = SpanScores(scorer=spans, debias=50.0, most_bias=0.25)
    found = method._rescored(given, batch, context())
    assert {span.score for row in found[:3] for span in row} == {0.75, 1.25}


def test_a_rank_without_rollouts_has_no_spans(golden_policy):
    """It is given one row without tokens, and the others wait for it in the next collective."""
    batch = played(GROUP)
    empty = batch.replace(episodes=None, turn=None, response_mask=torch.zeros_like(batch.response_mask))
    method = SpanScores(judge=Judge(url="http://127.0.0.1:1", model="m", retries=0), debias=0.5)
    assert method(golden_policy, empty, context()).fallback.all()


def test_labels_of_a_judge_are_scores_and_rollouts_that_have_none_are_uniform(golden_policy):
    """A rollout or a turn that calls no tool is not asked about; of another rollout the request fails."""
    played_by = [GROUP[0], GROUP[2], Row(0.0, [[16]])]
    replies = [(200, {"choices": [{"message": {"content": "1: good\n2: bad\n3: bad\n9: bad"}}]}), (400, b"")]
    with served(lambda question, n: replies["turn [18]" in question]) as (url, asked):
        method = SpanScores(judge=Judge(url=url, model="m", retries=0))
        weights = method(golden_policy, played(played_by), context())
    assert len(asked) == 2
    scored = [played_by[0]._replace(scores=[1.0, 0.0]), *(row._replace(scores=[]) for row in played_by[1:])]
    expected = SpanScores()(golden_policy, played(scored), context())
    assert torch.equal(weights.values, expected.values)
    assert weights.fallback.tolist() == expected.fallback.tolist() == [False, True, True]


UNSCORED = EnvironmentTask(Python).prompt({"problem": "1+1", "answer": "2"})


@pytest.mark.parametrize("method", [TurnRewards(), GiGPO(scores=True)])
def test_a_method_that_adds_scores_of_turns_tells_that_there_are_none(method):
    assert "adds the scores of the environment's method `score_turn`" in method.check_prompts([[UNSCORED]])
    assert GiGPO().check_prompts([[UNSCORED]]) == ""
    with pytest.raises(ValueError, match=r"needs an environment with the method `score_turn`, but that of `MathTask`"):
        method.check_prompts([[MathTask().prompt({"problem": "1+1", "answer": "2"})]])


@pytest.mark.parametrize("method", [CriticSearch(), SpanScores(), PermutedRewards(CriticSearch())])
def test_a_method_that_needs_scores_of_turns_says_so_before_a_model_is_loaded(method):
    with pytest.raises(ValueError, match=r"needs an environment with the method `score_turn`, but that of `Env"):
        method.check_prompts([[UNSCORED]])
    method.check_prompts([[EnvironmentTask(Search).prompt({"problem": "?", "answer": "Rome"})]])

"""Detection by hand, against SciPy, and of methods whose figures are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from grail_lightning.app.benchmark.detect import detect, of_lines, pairwise_auroc, rank_correlation
from grail_lightning.app.benchmark.labels import read_labels
from grail_lightning.app.benchmark.references import REFERENCES
from grail_lightning.app.benchmark.rollouts import open_world
from grail_lightning.app.benchmark.subjects import Subject
from grail_lightning.app.benchmark.weights import AllWeights, weigh
from tests.app.benchmark import methods


@pytest.fixture(scope="module")
def figures():
    """Figures of some rows on 12 batches of sums."""
    names = ("Uniform", "chance", "position", "-log p", "TreeAdvantage", "Oracle, blame alone")
    with open_world("sums", 12) as opened:
        weighted = {name: weigh(REFERENCES[name].subject(), opened) for name in names}
        for method in (methods.Constant(), methods.Opposite()):
            weighted[type(method).__name__] = weigh(Subject(name="ours", method=method), opened)
        labels = read_labels(opened)
        found = {name: detect(one, labels) for name, one in weighted.items()}
        del labels
    return found


def test_pairs_by_hand():
    scores = np.array([[3.0, 1.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    positive = np.array([[True, False, True, False], [False] * 4])
    negative = np.array([[False, True, False, True], [True] * 4])
    # 3 > 1, 3 > 2, 2 > 1 and 2 = 2: 3.5 of 4 pairs.
    area = pairwise_auroc(scores, positive, negative)
    assert area[0] == 3.5 / 4
    assert math.isnan(area[1])


def test_rank_correlations_are_those_of_scipy():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 4, size=(2, 30, 8)).astype(float)
    mask = rng.random((30, 8)) < 0.7
    mask[:, :3] = True
    one[0], other[1] = 1.0, 2.0  # No variation.
    found = rank_correlation(one, other, mask)
    with np.errstate(invalid="ignore"):
        expected = [
            spearmanr(a[m], b[m]).statistic if len({*a[m]}) > 1 < len({*b[m]}) else math.nan
            for a, b, m in zip(one, other, mask, strict=True)
        ]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert np.isnan(found[:2]).all()


def test_uniform_credit_and_a_constant_are_at_one_half_and_have_weight_one(figures):
    for name in ("Uniform", "Constant"):
        one = figures[name]
        for places in (one["auroc_rollout"], one["auroc_forks"]):
            assert [figure[0] for figure in places.values()] == [0.5, 0.5]
        assert all(figure == [1.0, 1.0, 1.0] for figure in one["weights"].values())
        assert one["blame"]["flawed"] == one["blame"]["flawed_uniform"]
        assert one["values"] == {"wrong": None, "right": None}
        assert one["reasons"]["values.wrong"] == "The ranks of lines do not vary within a rollout."
        assert (one["rollouts"], one["prompts"]) == (12 * 128, 12 * 16)


def test_random_scores_are_at_chance_within_their_intervals(figures):
    for places in (figures["chance"]["auroc_rollout"], figures["chance"]["auroc_forks"]):
        for estimate, low, high in places.values():
            assert low - 0.05 < 0.5 < high + 0.05
            assert abs(estimate - 0.5) < 0.1
    assert figures["chance"]["weights"] == dict.fromkeys(("flawed", "sound", "inherited", "filler", "answer"))
    assert figures["chance"]["reasons"]["weights"] == "A bare score of tokens has no weights."


def test_known_figures(figures):
    # Sound lines stand in front of the first error, and at a fork the position is the same.
    assert figures["position"]["auroc_rollout"]["misconception"][0] > 0.97
    assert {figure[0] for figure in figures["position"]["auroc_forks"].values()} == {0.5}
    assert figures["-log p"]["auroc_forks"]["slip"][0] > 0.98
    tree = figures["TreeAdvantage"]
    assert tree["auroc_forks"]["slip"][0] > 0.97
    assert tree["values"]["wrong"][1] > 0.6
    assert tree["weights"]["flawed"][1] > tree["weights"]["sound"][2]
    assert tree["blame"]["flawed"][1] > tree["blame"]["flawed_uniform"][2]
    oracle = figures["Oracle, blame alone"]
    assert oracle["blame"]["flawed"][0] > 0.9
    assert oracle["weights"]["sound"][0] < 0.2


def test_the_negative_of_a_method_is_below_chance_by_as_much(figures):
    for error, (estimate, *_) in figures["TreeAdvantage"]["auroc_forks"].items():
        assert figures["Opposite"]["auroc_forks"][error][0] == pytest.approx(1 - estimate)
        # The largest of a line's tokens is another one there.
        assert figures["Opposite"]["auroc_rollout"][error][2] < 0.5
    assert figures["Opposite"]["values"]["wrong"][2] < -0.6


def test_lines_have_the_largest_of_their_tokens_and_turns_their_mean():
    with open_world("search", 1) as opened:
        weighted = weigh(REFERENCES["position"].subject(), opened)
        labels = read_labels(opened)
        positions = np.arange(opened.batches[0].response_mask.shape[1], dtype=float)
        table = np.broadcast_to(positions, (128, len(positions)))
        middle = (labels.begin + labels.stop - 1) / 2
        found = of_lines(table, labels)
        np.testing.assert_allclose(found[labels.known], middle[labels.known])
        assert np.isnan(found[~labels.known]).all()
        one = detect(weighted, labels)
        assert list(one["auroc_rollout"]) == ["bad turn"]
        del labels
    with open_world("sums", 1) as opened:
        labels = read_labels(opened)
        table = np.tile(np.arange(opened.batches[0].response_mask.shape[1], dtype=float), (128, 1))
        assert (of_lines(table, labels)[labels.known] == labels.stop[labels.known] - 1).all()
        del labels


def test_figures_depend_on_ranks_alone_and_not_on_the_order_of_batches():
    with open_world("sums", 2) as opened:
        weighted = weigh(REFERENCES["-log p"].subject(), opened)
        labels = read_labels(opened)
        scaled = [replace(one, ranks=one.ranks.exp() * 3) for one in weighted.batches]
        again = detect(AllWeights(batches=scaled, by="score", reads=()), labels)
        first = detect(weighted, labels)
        assert {name: again[name] for name in ("auroc_rollout", "values")} == {
            name: first[name] for name in ("auroc_rollout", "values")
        }
        assert torch.is_tensor(weighted.batches[0].ranks)
        del labels

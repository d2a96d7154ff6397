import math
from itertools import combinations

import pytest
import torch

from grail_lightning.core.metrics import AnswerAccuracy, MajAtK, PassAtK, problem_metrics
from tests.tolerance import near


def _random_updates(num_updates):
    """Arguments for `num_updates` updates of every metric; later ones are shorter, the last one is empty."""
    generator = torch.Generator().manual_seed(3)
    for number in range(num_updates):
        rows = 4 * (num_updates - 1 - number)
        correct = torch.rand(rows, generator=generator) < 0.5
        lengths = torch.randint(1, 50, (rows,), generator=generator)
        yield {
            AnswerAccuracy: (correct, torch.arange(rows) // 4),
            PassAtK: (correct, torch.arange(rows) // 4),
            MajAtK: (correct, torch.arange(rows) // 4, lengths % 3 - 1),
        }


METRICS = [AnswerAccuracy, lambda: PassAtK(k=2), lambda: MajAtK(k=3)]


@pytest.mark.parametrize("make", METRICS)
def test_two_states_merged_equal_one_that_saw_everything(make):
    """What ranks do: each updates with its own rows, then the states are reduced as they say they are."""
    whole, first, second = make(), make(), make()
    for number, updates in enumerate(_random_updates(5)):
        arguments = updates[type(whole)]
        whole.update(*arguments)
        (first, second)[number % 2].update(*arguments)

    merged = make()
    for name, reduce in merged._reductions.items():
        parts = [getattr(metric, name) for metric in (first, second)]
        if isinstance(parts[0], list):
            setattr(merged, name, reduce([torch.cat(part) for part in parts]))
        else:
            setattr(merged, name, reduce(torch.stack(parts)))
    merged._update_count = 1

    assert float(merged.compute()) == near(float(whole.compute()), 16, torch.float32)
    assert float(first.compute()) != pytest.approx(float(whole.compute()), rel=1e-3), "it would prove nothing"


def test_a_metric_that_saw_only_empty_updates_is_nan_and_accuracy_is_of_all_responses():
    *_, empty = _random_updates(2)
    for make in METRICS:
        metric = make()
        assert [len(part) for part in metric.share()] == [0, 0]
        metric.update(*empty[type(metric)])
        assert math.isnan(metric.compute())
        assert [len(part) for part in metric.share()] == [0, 0]
    accuracy = AnswerAccuracy()
    for correct in ([True, True, True], [False]):  # Not the mean of the batches.
        accuracy.update(torch.tensor(correct), torch.zeros(len(correct)))
    assert accuracy.compute() == 0.75
    assert accuracy.share()[0].tolist() == [1, 0]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(5, 6, generator=generator) < 0.3
    rows = torch.randperm(30, generator=generator)
    metric = PassAtK(k=3)
    # Groups need not be in order, nor numbered from zero.
    metric.update(correct.flatten()[rows], (torch.arange(30) // 6)[rows] + 7)

    hits = [any(row[i] for i in chosen) for row in correct.tolist() for chosen in combinations(range(6), 3)]
    assert metric.compute() == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("make", [lambda: PassAtK(k=2), lambda: MajAtK(k=2)])
def test_shares_of_problems_sum_to_the_same_number_in_any_order(make):
    generator = torch.Generator().manual_seed(1)
    problems = [torch.rand(7, generator=generator) < 0.4 for _ in range(200)]
    votes = torch.tensor([0, 1, 2, 0, 1, 0, 0])
    found = set()
    for order in (range(200), reversed(range(200)), torch.randperm(200, generator=generator).tolist()):
        metric = make()
        for number in order:
            rows = problems[number], torch.zeros(7, dtype=torch.long), votes
            metric.update(*(rows if isinstance(metric, MajAtK) else rows[:2]))
        found.add(metric.compute().item())
    assert len(found) == 1


def test_each_problem_keeps_its_value_with_the_variance_over_other_samples():
    """Problems 4 and 7, of three and of two samples, in the order of their numbers, whatever that of the rows is."""
    group = torch.tensor([7, 4, 4, 7, 4])
    right, votes = torch.tensor([True, True, False, False, True]), torch.tensor([0, 0, 1, 1, 0])
    metrics = problem_metrics(pass_at=(2,), maj_at=(1,))
    metrics.update(correct=right, group=group, votes=votes)
    shares = {name: [part.tolist() for part in metric.share()] for name, metric in metrics.items()}
    assert shares["accuracy"][0] == pytest.approx([2 / 3, 1 / 2])
    assert shares["accuracy"][1] == pytest.approx([2 / 9 / 3, 1 / 4 / 2]), "p(1 - p)/n"
    # Pairs of three samples of which 0, 1, 2 or 3 are right: 0, 2/3, 1, 1, with the chances 1, 6, 12 and 8 of 27.
    mean = (6 * 2 / 3 + 20) / 27
    assert shares["pass_at_2"][0] == [1, 1]
    assert shares["pass_at_2"][1] == pytest.approx([(6 * 4 / 9 + 20) / 27 - mean**2, 3 / 16])
    assert shares["maj_at_1"][0] == pytest.approx([2 / 3, 1 / 2])
    assert shares["maj_at_1"][1] == pytest.approx(shares["accuracy"][1])
    whole = {name: float(value) for name, value in metrics.compute().items()}
    assert whole == {
        "accuracy": near(3 / 5, 1, torch.float32),
        "pass_at_2": 1,
        "maj_at_1": near(7 / 12, 1, torch.float32),
    }

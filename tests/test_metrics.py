import math
from itertools import combinations

import pytest
import torch

from grail_lightning.metrics import (
    STATUSES,
    AnswerAccuracy,
    LengthsByVerdict,
    MajAtK,
    PassAtK,
    ResponseLengths,
    StatusCounts,
)
from tests.tolerance import near


def _figures(metric):
    value = metric.compute()
    return {name: float(v) for name, v in (value if isinstance(value, dict) else {"value": value}).items()}


def _random_updates(num_updates):
    """Arguments for `num_updates` updates of every metric; later ones are shorter, the last one is empty."""
    generator = torch.Generator().manual_seed(3)
    for number in range(num_updates):
        rows = 4 * (num_updates - 1 - number)
        correct = torch.rand(rows, generator=generator) < 0.5
        lengths = torch.randint(1, 50, (rows,), generator=generator)
        yield {
            AnswerAccuracy: (correct,),
            PassAtK: (correct, torch.arange(rows) // 4),
            MajAtK: (correct, torch.arange(rows) // 4, lengths % 3 - 1),
            LengthsByVerdict: (lengths, correct),
            ResponseLengths: (lengths, lengths < 40),
            StatusCounts: ([STATUSES[n % 7] for n in lengths.tolist()],),
        }


METRICS = [AnswerAccuracy, lambda: PassAtK(k=2), lambda: MajAtK(k=3), ResponseLengths, LengthsByVerdict, StatusCounts]


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
        setattr(merged, name, reduce(torch.stack([getattr(first, name), getattr(second, name)])))
    merged._update_count = 1

    assert _figures(merged) == near(_figures(whole), 16, torch.float32)
    assert _figures(first) != pytest.approx(_figures(whole), rel=1e-3), "halves that agree would prove nothing"


@pytest.mark.parametrize("make", METRICS)
def test_a_metric_that_saw_only_empty_updates_is_nan_or_counts_nothing(make):
    metric = make()
    *_, empty = _random_updates(2)
    metric.update(*empty[type(metric)])
    values = list(_figures(metric).values())
    if isinstance(metric, StatusCounts):
        assert values == [0] * 7
    else:
        assert all(value != value for value in values)


@pytest.mark.parametrize("make", METRICS)
def test_reset_forgets_everything(make):
    metric, fresh = make(), make()
    first, second, _ = _random_updates(3)
    metric.update(*first[type(metric)])
    metric.reset()
    for m in (metric, fresh):
        m.update(*second[type(metric)])
    assert _figures(metric) == _figures(fresh)


def _bools(*values):
    return torch.tensor([bool(value) for value in values])


@pytest.mark.parametrize(
    ("metric", "updates", "figures"),
    [
        # (3 + 0) / (3 + 1) responses; the mean of the batches would be (1 + 0) / 2.
        (AnswerAccuracy(), [(_bools(1, 1, 1),), (_bools(0),)], {"value": 0.75}),
        (
            ResponseLengths(),
            [(torch.tensor([3, 8]), _bools(1, 0)), (torch.tensor([4]), _bools(1))],
            {"mean_length": 5, "min_length": 3, "max_length": 8, "clipped_ratio": 1 / 3},
        ),
        (
            LengthsByVerdict(),
            [(torch.tensor([3, 8, 5]), _bools(1, 0, 1))],
            {"mean_length_right": 4, "mean_length_wrong": 8},
        ),
        (
            LengthsByVerdict(),
            [(torch.tensor([3]), _bools(1))],
            {"mean_length_right": 3, "mean_length_wrong": math.nan},
        ),
        (
            StatusCounts(),
            [(["right", "wrong", "right"],), (["timeout"],)],
            dict.fromkeys(STATUSES, 0) | {"right": 2, "wrong": 1, "timeout": 1},
        ),
    ],
)
def test_figures_are_of_all_responses_by_the_names_that_grpo_users_know(metric, updates, figures):
    for arguments in updates:
        metric.update(*arguments)
    assert _figures(metric) == pytest.approx(figures, nan_ok=True)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(5, 6, generator=generator) < 0.3
    rows = torch.randperm(30, generator=generator)
    metric = PassAtK(k=3)
    # Groups need not be in order, nor numbered from zero.
    metric.update(correct.flatten()[rows], (torch.arange(30) // 6)[rows] + 7)

    hits = [any(row[i] for i in chosen) for row in correct.tolist() for chosen in combinations(range(6), 3)]
    assert metric.compute() == pytest.approx(sum(hits) / len(hits))


def test_pass_at_k_needs_k_samples_a_problem():
    with pytest.raises(ValueError, match="pass@4 needs at least 4 samples"):
        PassAtK(k=4).update(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="`k` must be at least 1, but got 0"):
        PassAtK(k=0)


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

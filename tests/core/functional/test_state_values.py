"""Values of states against loops over dictionaries of paths."""

import random

import pytest
import torch

from grail_lightning.core.functional.states import state_values, value_changes


def _random_paths(seed, merge):
    """Rows as lists of states, each beginning with one of two roots (0 and 1)."""
    rng = random.Random(seed)
    rows = []
    for k in range(9):
        root, path = k % 2, []
        for _ in range(rng.randint(0, 7)):
            before = path[-1] if path else root
            # A state has its root's parity, so that the groups have no state in common.
            path.append(before if merge and rng.random() < 0.4 else 2 * rng.randint(1, 6) + root)
        rows.append((root, path))
    outcomes = [rng.choice([0.0, 1.0, 0.3]) for _ in rows]
    return rows, outcomes


def _tensors(rows, outcomes):
    width = max(len(path) for _, path in rows)
    path = torch.tensor([[root, *path, *[-1] * (width - len(path))] for root, path in rows])
    return path, torch.tensor(outcomes, dtype=torch.float64)


def _by_hand(rows, outcomes, own_row, shrinkage):
    """The values before the first and after each token, and the changes, of each row as lists."""
    values, changes = [], []
    for i, (root, path) in enumerate(rows):
        own = []
        for t, state in enumerate([root, *path]):
            others = [j for j, (r, p) in enumerate(rows) if state in [r, *p] and (own_row or j != i)]
            total = sum(outcomes[j] for j in others)
            if own_row:
                own.append(total / len(others))
            elif t == 0:
                own.append(total / len(others) if others else outcomes[i])
            elif not others or state == [root, *path][t - 1]:
                own.append(own[-1])
            else:
                own.append((total + shrinkage * own[-1]) / (len(others) + shrinkage))
        change = []
        for t in range(len(path)):
            end = next((e for e in range(t, len(path)) if path[e] != [root, *path][e]), None)
            change.append((outcomes[i] if end is None else own[end + 1]) - own[t])
        values.append(own)
        changes.append(change)
    return values, changes


@pytest.mark.parametrize("shrinkage", [0.0, 2.5])
@pytest.mark.parametrize("own_row", [True, False])
@pytest.mark.parametrize(("seed", "merge"), [(0, True), (1, False), (2, True)])
def test_values_and_changes_are_those_of_loops(seed, merge, own_row, shrinkage):
    rows, outcomes = _random_paths(seed, merge)
    path, given = _tensors(rows, outcomes)
    values, number = state_values(path, given, own_row=own_row, shrinkage=shrinkage)
    changes = value_changes(path, given, values)
    expected, expected_changes = _by_hand(rows, outcomes, own_row, shrinkage)
    for row in range(len(rows)):
        n = len(expected[row])
        assert values[row, :n].tolist() == pytest.approx(expected[row], abs=1e-12)
        assert (values[row, n:] == values[row, n - 1]).all()
        reached = [sum(state in [r, *p] for r, p in rows) for state in [rows[row][0], *rows[row][1]]]
        assert number[row, :n].tolist() == reached
        assert changes[row, : n - 1].tolist() == pytest.approx(expected_changes[row], abs=1e-12)
        assert (changes[row, n - 1 :] == 0).all()

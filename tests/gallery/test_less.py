"""LESS against loops over lists, on hand-sized groups, on random ones, and on the golden rows."""

import random

import pytest
import torch

from grail_lightning.core.functional.weighting import segment_weights
from grail_lightning.credit import LESS
from tests.core.credit.rollouts import context, in_groups


def _contains(run, segment):
    return [k for k in range(len(run) - len(segment) + 1) if run[k : k + len(segment)] == segment]


def _by_hand(ids, entropies, correct, share, min_length):
    """Lists of lists in, lists of lists out."""
    weights, runs = [], []  # runs: (row, first column, tokens)
    for row, (tokens, entropy) in enumerate(zip(ids, entropies, strict=True)):
        n = len(tokens)
        threshold = sorted(entropy)[min(round(share * n), n - 1)]
        alike = correct.count(correct[row])
        weights.append([1 / alike if h <= threshold else 1.0 for h in entropy])
        start = None
        for t in range(n + 1):
            low = t < n and entropy[t] < threshold
            if low and start is None:
                start = t
            if not low and start is not None:
                if t - start >= min_length:
                    runs.append((row, start, tokens[start:t]))
                start = None
    zeros = []
    for _, _, segment in runs:
        places = [(row, first + k) for row, first, run in runs for k in _contains(run, segment)]
        holders = {row for row, _ in places}
        for row, first in places:
            for t in range(first, first + len(segment)):
                if len({correct[r] for r in holders}) == 2:
                    zeros.append((row, t))
                else:
                    weights[row][t] = max(weights[row][t], len(holders) / correct.count(correct[row]))
    for row, t in zeros:
        weights[row][t] = 0.0
    return weights


def _ours(ids, entropies, correct, share, min_length):
    width = max(len(row) for row in ids)
    pad = [[*row, *[0] * (width - len(row))] for row in ids]
    high = [[*row, *[9.0] * (width - len(row))] for row in entropies]
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in ids])
    found = segment_weights(
        torch.tensor(pad), torch.tensor(high), mask, torch.tensor(correct), share=share, min_length=min_length
    )
    assert (found[~mask] == 0).all()
    return [row[: len(own)] for row, own in zip(found.tolist(), ids, strict=True)]


def test_random_groups_equal_a_plain_loop():
    """A vocabulary of three tokens and runs of two: segments repeat, overlap and nest."""
    seen = set()
    for seed in range(30):
        rng = random.Random(seed)
        ids = [[rng.randrange(3) for _ in range(rng.randint(1, 14))] for _ in range(5)]
        entropies = [[rng.choice([0.1, 0.2, 0.3, 0.4]) for _ in row] for row in ids]
        correct = [rng.random() < 0.5 for _ in ids]
        expected = _by_hand(ids, entropies, correct, 0.7, 2)
        for found, by_hand in zip(_ours(ids, entropies, correct, 0.7, 2), expected, strict=True):
            assert found == pytest.approx(by_hand)
        seen |= {round(w, 3) for row in expected for w in row}
    assert {0.0, 0.25, 0.333, 0.5, 0.667, 0.75, 1.0} <= seen, "every kind of segment is there"


def test_less_compares_rollouts_only_within_their_group(golden_policy, golden_batch):
    """Rows 1 and 2 say what row 0 says: right and wrong rollouts share it all. Nothing is shared across groups."""
    batch = in_groups(golden_batch)
    batch = batch.select(torch.tensor([1, 1, 1, 1, 4, 5])).replace(
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        correct=torch.tensor([True, False, False, False, True, True]),
        advantages=torch.tensor([0.7, -0.3, -0.4, 0.0, 0.0, 0.0]),
    )
    weights = LESS(min_length=3)(golden_policy, batch, context())
    n = int(batch.response_mask[0].sum())
    expected = _by_hand(
        batch.response_ids[:3, :n].tolist(), weights.scores[:3, :n].tolist(), [True, False, False], 0.8, 3
    )
    torch.testing.assert_close(weights.values[:3, :n], torch.tensor(expected).double())
    assert (weights.values[:3, :n] == 0).any()
    assert torch.equal(weights.values[3:].bool(), batch.response_mask[3:]), "a group without an advantage: uniform"
    assert weights.scores[3:].abs().max() == 0, "and no forward pass"

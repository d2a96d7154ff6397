"""AttentionRhythm against loops over the attention maps of single rows, unpadded."""

import math
import statistics

import pytest
import torch

from grail_lightning.credit import AttentionOptions, AttentionRhythm
from grail_lightning.gallery.rhythm import middle_blocks
from tests.core.credit.rollouts import context
from tests.tolerance import near

OPTIONS = AttentionOptions(blocks=2, head_share=0.4, window=4, nearest=2, farthest=6)


@torch.no_grad()
def _by_hand(policy, batch, row):
    """Lookback and influence of each response token of a row, as lists, from the model's own maps."""
    ids = batch.input_ids[row][batch.attention_mask[row]][:-1]  # the last token is not run
    length = int(batch.response_mask[row].sum())
    with policy.eager_attention():
        maps = policy.model(ids[None], output_attentions=True, use_cache=False).attentions
    heads = [
        head.tolist() for block in middle_blocks(len(policy.blocks), OPTIONS.blocks) for head in maps[block][0].float()
    ]
    first = len(ids) - (length - 1)
    queries = range(first, len(ids))
    spans = [statistics.fmean(sum(a * (t - s) for s, a in enumerate(head[t])) for t in queries) for head in heads]
    number = max(1, int(OPTIONS.head_share * len(heads)))
    order = sorted(range(len(heads)), key=spans.__getitem__)

    def influence(head, s):
        seen = [head[t][s] for t in queries if OPTIONS.nearest <= t - s <= OPTIONS.farthest]
        return statistics.fmean(seen) if seen else 0.0

    def lookback(head, t):
        return sum(a * min(t - s, OPTIONS.window) for s, a in enumerate(head[t][: t + 1]))

    near_heads, far_heads = [heads[j] for j in order[:number]], [heads[j] for j in order[-number:]]
    looks = [statistics.fmean(lookback(h, t) for h in near_heads) for t in queries] + [0.0]
    felt = [statistics.fmean(influence(h, s) for h in far_heads) for s in queries] + [0.0]
    change = [abs(looks[t] - looks[t + 1]) if t < length - 2 else 0.0 for t in range(length)]
    return looks, felt, change


def _top(scores):
    number = math.ceil(0.4 * len(scores))
    return {t for t in sorted(range(len(scores)), key=lambda t: (-scores[t], t))[:number] if scores[t] > 0}


def _passed_on(expected, anchors, looks, change):
    """Weights after a local anchor has passed half of its bonus to the token that introduced it."""
    middle = sorted(looks[:-1])[(len(looks) - 2) // 2]  # The lower of the two; the last token is no query.
    found = list(expected)
    for t in sorted(anchors):
        before = range(max(0, t - 3), t)
        if looks[t] < middle and before:
            giver = max(before, key=lambda k: (change[k], -k))
            found[t] -= 0.25
            found[giver] += 0.25
    return found


@pytest.mark.parametrize("rhythm", ["pre_plan", "anchor", "coupled"])
def test_scores_and_weights_are_those_of_the_maps(rhythm, golden_policy, batch):
    weights = AttentionRhythm(rhythm, attention=OPTIONS)(golden_policy, batch, context())
    for row in (0, 4):
        looks, felt, change = _by_hand(golden_policy, batch, row)
        scores = change if rhythm == "pre_plan" else felt
        assert weights.scores[row, : len(scores)].tolist() == near(scores, 1000, torch.float32, scale=4.0)
        marked = _top(scores)
        expected = [1.5 if t in marked else 1.0 for t in range(len(scores))]
        if rhythm == "coupled":
            plain, expected = expected, _passed_on(expected, marked, looks, change)
            assert sum(a != b for a, b in zip(plain, expected, strict=True)) > 3
        assert weights.values[row, : len(scores)].tolist() == near(expected, 10, torch.float32, scale=2.0)
    others = batch.advantages <= 0
    assert torch.equal(weights.values[others], batch.response_mask[others].to(weights.values.dtype))
    every = AttentionRhythm(rhythm, attention=OPTIONS, gate="all")(golden_policy, batch, context()).values
    changed = (every != batch.response_mask).any(1)
    assert changed.tolist() == [True] * 5 + [False], "the last row has no advantage"


@pytest.mark.parametrize(
    ("depth", "number", "expected"), [(36, 5, [12, 15, 18, 21, 24]), (4, 5, [1, 2, 3]), (1, 5, [0]), (6, 1, [2])]
)
def test_blocks_lie_in_the_middle_third(depth, number, expected):
    assert middle_blocks(depth, number) == expected

"""Does a method find the errors? Its tokens' ranks and weights beside the labels of the stored rollouts.

Shapes: ``R`` rows of all batches, ``T`` response tokens, ``S`` lines, ``M`` forks.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from grail_lightning.app.benchmark.intervals import Interval, Sums, mean, share
from grail_lightning.app.benchmark.labels import Forks, Labels
from grail_lightning.app.benchmark.rollouts import GROUP_SIZE
from grail_lightning.app.benchmark.weights import AllWeights

Array = NDArray[Any]
_KINDS = ("flawed", "sound", "inherited", "filler", "answer")
_ROWS = 512  # Of a part of the computation, so that tables of lines and tokens stay small.


def detect(weighted: AllWeights, labels: Labels) -> dict[str, Any]:
    """The figures of a method in a world.

    Returns:
        ``auroc_rollout`` and ``auroc_forks`` by kind of error: the probability that a flawed line ranks above a sound
        one of the same wrong rollout, or of another one that is equal up to the token at which they part. ``blame``:
        the share of the absolute advantages of flawed rollouts that lies on flawed lines, and that of uniform credit.
        ``values``: Spearman's correlation, within each rollout, of the ranks of lines with what they change in the
        value of the state, by outcome; in wrong rollouts the loss. ``weights``: the mean weight in wrong rollouts by
        kind of line. Each is an `Interval`, or None where there is nothing to measure, and ``reasons`` says why.
        ``rollouts``, ``prompts``, ``wrong`` and ``right`` are numbers of rollouts, prompts, and rollouts that count.
    """
    reasons: dict[str, str] = {}
    ranks = _table([one.ranks.numpy() for one in weighted.batches])
    bare = weighted.batches[0].effective is None
    lines = of_lines(ranks, labels)
    figures: dict[str, Any] = {
        "rollouts": len(ranks),
        "prompts": len(ranks) // GROUP_SIZE,
        "wrong": int(labels.wrong.sum()),
        "right": int(labels.right.sum()),
        "by": weighted.by,
        "auroc_rollout": {error: share(_within(lines, labels, error)) for error in labels.forks},
        "values": {outcome: mean(_agreement(lines, labels, outcome)) for outcome in ("wrong", "right")},
    }
    effective = ranks if bare else _table([_numpy(one.effective) for one in weighted.batches])
    of_effective = of_lines(effective, labels) if labels.world.turns else None
    figures["auroc_forks"] = {
        error: share(_at_forks(forks, effective, of_effective)) for error, forks in labels.forks.items()
    }
    if bare:
        figures["blame"] = {"flawed": None, "flawed_uniform": None}
        figures["weights"] = dict.fromkeys(_KINDS)
        reasons |= dict.fromkeys(("blame", "weights"), "A bare score of tokens has no weights.")
    else:
        figures["blame"] = {
            "flawed": share(_blame(effective, labels)),
            "flawed_uniform": share(_blame(np.ones_like(effective) * _sampled(weighted), labels)),
        }
        figures["weights"] = {kind: _weight(effective, labels, kind) for kind in _KINDS}
        for kind in _KINDS:
            if kind not in labels.kinds:
                reasons[f"weights.{kind}"] = "This world has no lines of this kind."
    reasons |= _missing(figures, reasons)
    return figures | {"reasons": reasons}


def of_lines(scores: Array, labels: Labels) -> Array:
    """``[R, T] -> [R, S]``: the largest score of a line's tokens, of a turn their mean; NaN where there is no line."""
    rows, width = scores.shape
    columns, result = np.arange(width), np.full(labels.begin.shape, np.nan)
    for k in range(0, rows, _ROWS):
        some = slice(k, k + _ROWS)
        begin, stop = labels.begin[some, :, None], labels.stop[some, :, None]
        inside, table = (columns >= begin) & (columns < stop), scores[some, None, :]
        if labels.world.turns:
            inside &= ~np.isnan(table)
            number = inside.sum(-1)
            total = np.where(inside, table, 0).sum(-1)
            result[some] = np.where(number > 0, total / np.maximum(number, 1), np.nan)
        else:
            largest = np.where(inside, table, -np.inf).max(-1)
            result[some] = np.where(inside.any(-1), largest, np.nan)
    return result


def pairwise_auroc(scores: Array, positive: Array, negative: Array) -> Array:
    r"""The probability that a positive line has a higher score than a negative one of its row; ties count one half.

    .. math:: \frac{1}{|P||N|} \sum_{i \in P, j \in N} [s_i > s_j] + \tfrac12 [s_i = s_j]

    All three are ``[R, S]``, the masks bool; the result is ``[R]``, NaN where a row lacks one of the two.
    """
    above = (scores[:, :, None] > scores[:, None, :]) + (scores[:, :, None] == scores[:, None, :]) / 2
    pairs = positive[:, :, None] & negative[:, None, :]
    number = pairs.sum((1, 2))
    return np.where(number > 0, np.where(pairs, above, 0).sum((1, 2)) / np.maximum(number, 1), np.nan)


def rank_correlation(one: Array, other: Array, mask: Array) -> Array:
    """``[R]``: Spearman's ρ of two ``[R, S]`` within each row's mask; NaN where one of them does not vary."""
    a, b = (_centred_ranks(values, mask) for values in (one, other))
    scale = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return np.where(scale > 0, (a * b).sum(1) / np.where(scale > 0, scale, 1), np.nan)


def _centred_ranks(values: Array, mask: Array) -> Array:
    """``[R, S]``: average ranks within each row's mask, less their mean; 0 elsewhere."""
    below = (values[:, None, :] < values[:, :, None]) + (values[:, None, :] == values[:, :, None]) / 2
    ranks = np.where(mask[:, None, :], below, 0).sum(-1)
    centre = np.where(mask, ranks, 0).sum(1) / np.maximum(mask.sum(1), 1)
    return np.where(mask, ranks - centre[:, None], 0)


# --- the figures ------------------------------------------------------------------------------------------------------


def _within(lines: Array, labels: Labels, error: str) -> Sums:
    """Flawed against sound lines of the same wrong rollout."""
    measured = labels.wrong[:, None] & ~np.isnan(lines)
    return Sums.of_rows(
        pairwise_auroc(lines, labels.kind[error] & measured, labels.kind["sound"] & measured), GROUP_SIZE
    )


def _at_forks(forks: Forks, tokens: Array, lines: Array | None) -> Sums:
    """Flawed against sound tokens at forks, of rollouts of several turns against sound turns."""
    table, place = (tokens, forks.token) if lines is None else (lines, forks.line)
    flawed, sound = (table[row, place] for row in forks.row)
    known = ~(np.isnan(flawed) | np.isnan(sound))
    won = ((flawed > sound) + (flawed == sound) / 2) * known
    group, number = forks.row[0] // GROUP_SIZE, len(tokens) // GROUP_SIZE
    return Sums(np.bincount(group, won, number).astype(float), np.bincount(group, known, number).astype(float))


def _agreement(lines: Array, labels: Labels, outcome: Literal["wrong", "right"]) -> Sums:
    earned = labels.earned
    rho = rank_correlation(lines, earned, labels.known & ~np.isnan(earned) & ~np.isnan(lines))
    rows = labels.wrong if outcome == "wrong" else labels.right
    return Sums.of_rows(np.where(rows, rho, np.nan), GROUP_SIZE)


def _blame(weights: Array, labels: Labels) -> Sums:
    """The share of the sum of absolute weights of flawed rollouts that lies on flawed lines."""
    flawed = _fitted(labels.kinds["flawed"], weights.shape[1])
    blame = np.abs(weights) * (labels.wrong & flawed.any(1))[:, None]
    return Sums(*(part.sum(1).reshape(-1, GROUP_SIZE).sum(1) for part in (blame * flawed, blame)))


def _weight(weights: Array, labels: Labels, kind: str) -> Interval | None:
    if kind not in labels.kinds:
        return None
    inside = _fitted(labels.kinds[kind], weights.shape[1]) & labels.wrong[:, None]
    totals = (weights * inside).sum(1).reshape(-1, GROUP_SIZE).sum(1)
    return mean(Sums(totals, inside.sum(1).reshape(-1, GROUP_SIZE).sum(1).astype(float)))


def _missing(figures: dict[str, Any], reasons: dict[str, str]) -> dict[str, str]:
    """A reason for each figure that is None without one."""
    found = {}
    why = {
        "auroc_rollout": "No wrong rollout has both a line with this error and a sound one.",
        "auroc_forks": "No two wrong rollouts part into a line with this error and a sound one.",
        "values": "The ranks of lines do not vary within a rollout.",
        "blame": "No wrong rollout has a flawed line.",
        "weights": "No wrong rollout has a line of this kind.",
    }
    for name, reason in why.items():
        for key, figure in figures[name].items():
            if figure is None and name not in reasons and f"{name}.{key}" not in reasons:
                found[f"{name}.{key}"] = reason
    return found


def _sampled(weighted: AllWeights) -> Array:
    return _table([one.batch.response_mask.numpy() for one in weighted.batches])


def _numpy(tensor: Any) -> Array:
    table: Array = tensor.numpy()
    return table


def _table(parts: list[Array]) -> Array:
    """Tables ``[B, T]`` of batches as one ``[R, T]``."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def _fitted(mask: Array, width: int) -> Array:
    return mask[:, :width] if mask.shape[1] >= width else np.pad(mask, ((0, 0), (0, width - mask.shape[1])))

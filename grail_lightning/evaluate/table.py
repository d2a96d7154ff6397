"""The table of an evaluation, with 95 % intervals: what `test` prints, and what regrading prints anew.

Shapes: ``N`` problems, ``n`` samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grail_lightning.evaluate.records import Problem
from grail_lightning.evaluate.statistics import average_interval, mean_interval, ratio_interval, vote_noise
from grail_lightning.functional import maj_at_k, pass_at_k, pass_at_k_variance

ERRORS = ("capped", "unparseable", "timeout", "crashed")
"""The statuses with which the verifier could not compare an answer; they count as not right."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What the table shows.

    Attributes:
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        by: The columns of the data by which the problems are told apart.
        first: The number of rows of each dataset that is not evaluated as a whole.
    """

    pass_at: Sequence[int] = ()
    maj_at: Sequence[int] = ()
    by: Sequence[str] = ()
    first: Mapping[str, int] = field(default_factory=dict)


LENGTHS = {"mean tokens": None, "of right": True, "of wrong": False}
"""The columns of lengths: whether they are of right responses or of the others; None for all."""
FAILURES: dict[str, Callable[[Problem], Sequence[bool]]] = {
    "truncated": lambda problem: [not ended for ended in problem.finished],
    "no answer": lambda problem: [status == "missing" for status in problem.statuses],
    "grading errors": lambda problem: [status in ERRORS for status in problem.statuses],
}
"""The columns of failures: which samples of a problem are one."""


class _Shares(NamedTuple):
    """One figure of each problem ``[N]``, and its variance ``[N]`` over other samples of the problem."""

    values: Tensor
    noise: Tensor


def evaluation_table(problems: Sequence[Problem], options: TableOptions) -> str:
    """The table: a line for each dataset, then both averages; lengths and failures likewise; and parts by column.

    Args:
        problems: The problems, of one dataset after the other.
        options: What to show.
    """
    parts = _by(problems, lambda problem: problem.dataset)
    named = {_label(name, options.first): found for name, found in parts.items()}
    blocks = [_accuracies(named, options, averages=True), _responses(named)]
    for column in options.by:
        split = {
            f"{label}, {column} {value}": found
            for label, whole in named.items()
            for value, found in _values(whole, column).items()
        }
        there = _accuracies(split, options, averages=False) if split else f"No problem has a column {column!r}."
        blocks.append(there)
    blocks.append("In brackets: 95 % intervals.")
    return "\n\n".join(blocks)


def by_column(problems: Sequence[Problem], column: str) -> Iterator[tuple[str, str, list[Problem]]]:
    """The problems of each dataset and value of a column, with both; those without the column are left out."""
    for name, whole in _by(problems, lambda problem: problem.dataset).items():
        for value, found in _values(whole, column).items():
            yield name, value, found


def _accuracies(parts: Mapping[str, Sequence[Problem]], options: TableOptions, *, averages: bool) -> str:
    num_samples = len(next(iter(parts.values()))[0].correct)
    several = num_samples > 1
    columns = [f"acc@{num_samples}", *(["spread of runs"] if several else [])]
    columns += [f"pass@{k}" for k in options.pass_at] + [f"maj@{k}" for k in options.maj_at]
    shares = {name: _shares(problems, options) for name, problems in parts.items()}
    rows = [(name, str(len(parts[name])), _cells(parts[name], found, several)) for name, found in shares.items()]
    if averages and len(parts) > 1:
        everything = [problem for problems in parts.values() for problem in problems]
        weights = [len(problems) / len(everything) for problems in parts.values()]
        together = _average(shares, _spread(everything) if several else [], weights)
        rows.append(("weighted by size", str(len(everything)), together))
        rows.append(("simple average", "", _average(shares, [""] if several else [])))
    return _lines(["problems", *columns], [(name, [count, *cells]) for name, count, cells in rows])


def _responses(parts: Mapping[str, Sequence[Problem]]) -> str:
    """Lengths in tokens, and the shares of responses that were cut, have no answer or could not be graded."""
    datasets = list(parts.values())
    size = sum(map(len, datasets))
    weights = {"weighted by size": [len(problems) / size for problems in datasets]}
    weights |= {"simple average": [1 / len(datasets)] * len(datasets)}
    head, rows = [], [(name, list[str]()) for name in (*parts, *(weights if len(parts) > 1 else []))]
    for column, kind in LENGTHS.items():
        lengths = [_lengths(problems, kind) for problems in datasets]
        found = [_mean([length]) for length in lengths]
        cells = [*found, _mean(lengths), _average_length(found)]
        head.append(column)
        for (_, row), (value, limits) in zip(rows, cells, strict=False):
            row.append("-" if math.isnan(value) else _cell(value, limits, 1))
    for column, is_one in FAILURES.items():
        shares = [_failures(problems, is_one) for problems in datasets]
        single = [_figure(share) for share in shares]
        head.append(column)
        for (_, row), (value, limits) in zip(
            rows, [*single, *(_weighted(single, w) for w in weights.values())], strict=False
        ):
            row.append(_cell(value, limits))
    return _lines(head, rows)


class _Lengths(NamedTuple):
    """The tokens of the responses of one kind ``[N]``, and the number of these responses ``[N]``, of each problem."""

    tokens: list[int]
    number: list[int]


_Estimate = tuple[float, tuple[float, float]]  # A figure, and its limits.


def _lengths(problems: Sequence[Problem], kind: bool | None) -> _Lengths:
    """The lengths of all responses, or of the right or the wrong ones."""
    kept = [
        [n for n, right in zip(problem.lengths, problem.correct, strict=True) if kind in (None, right)]
        for problem in problems
    ]
    return _Lengths([sum(part) for part in kept], [len(part) for part in kept])


def _mean(lengths: Sequence[_Lengths]) -> _Estimate:
    """The mean length of the responses of some datasets, all alike; NaN without any."""
    tokens, number = (sum(sum(part[k]) for part in lengths) for k in (0, 1))
    limits = ratio_interval([part.tokens for part in lengths], [part.number for part in lengths])
    return (tokens / number if number else math.nan), limits


def _average_length(found: Sequence[_Estimate]) -> _Estimate:
    """The mean of the datasets' means; NaN if one has no response of the kind."""
    means, limits = zip(*found, strict=True)
    known = not any(math.isnan(low) for low, _ in limits)
    return sum(means) / len(means), average_interval(means, limits, most=math.inf) if known else (math.nan, math.nan)


def _figure(shares: _Shares) -> _Estimate:
    """The mean over problems."""
    return float(shares.values.mean()), mean_interval(shares.values, shares.noise)


def _weighted(found: Sequence[_Estimate], weights: Sequence[float]) -> _Estimate:
    """The weighted average of the datasets' shares."""
    means, limits = zip(*found, strict=True)
    return sum(w * mean for w, mean in zip(weights, means, strict=True)), average_interval(means, limits, weights)


def _failures(problems: Sequence[Problem], is_one: Callable[[Problem], Sequence[bool]]) -> _Shares:
    """The share of the samples of each problem that are something."""
    found = torch.tensor([is_one(problem) for problem in problems])
    number, there = found.shape[1], found.sum(1)
    return _Shares(pass_at_k(number, there, 1), pass_at_k_variance(number, there, 1))


def _shares(problems: Sequence[Problem], options: TableOptions) -> list[_Shares]:
    """The share of correct samples, each pass@k and each maj@k."""
    correct = torch.tensor([problem.correct for problem in problems])
    number, right = correct.shape[1], correct.sum(1)
    found = [_Shares(pass_at_k(number, right, k), pass_at_k_variance(number, right, k)) for k in (1, *options.pass_at)]
    for k in options.maj_at:
        votes = torch.tensor([maj_at_k(problem.votes, problem.correct, k) for problem in problems], dtype=torch.float64)
        found.append(_Shares(votes, torch.from_numpy(vote_noise(votes, number, k))))
    return found


def _cells(problems: Sequence[Problem], shares: list[_Shares], several: bool) -> list[str]:
    first, *others = (_cell(*_figure(share)) for share in shares)
    return [first, *(_spread(problems) if several else []), *others]


def _spread(problems: Sequence[Problem]) -> list[str]:
    """The spread of the sampling runs: the population standard deviation of their accuracies."""
    return [f"{torch.tensor([problem.correct for problem in problems]).double().mean(0).std(correction=0):.3f}"]


def _average(
    shares: Mapping[str, list[_Shares]], spread: list[str], weights: Sequence[float] | None = None
) -> list[str]:
    """Averages over datasets, equally weighted unless `weights` are given."""
    parts = weights or [1 / len(shares)] * len(shares)
    columns = zip(*shares.values(), strict=True)
    first, *others = (_cell(*_weighted([_figure(share) for share in column], parts)) for column in columns)
    return [first, *spread, *others]


def _cell(mean: float, interval: tuple[float, float], digits: int = 3) -> str:
    low, high = ("-" if math.isnan(limit) else f"{limit:.{digits}f}" for limit in interval)
    return f"{mean:.{digits}f} [{low}, {high}]"


def _lines(head: list[str], rows: list[tuple[str, list[str]]]) -> str:
    name_width = max(len(name) for name, _ in rows)
    widths = [max(len(cell) for cell in column) for column in zip(head, *(cells for _, cells in rows), strict=True)]
    return "\n".join(
        f"{name:{name_width}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in [("", head), *rows]
    )


def _by(problems: Sequence[Problem], key: Callable[[Problem], str]) -> dict[str, list[Problem]]:
    parts: dict[str, list[Problem]] = {}
    for problem in problems:
        parts.setdefault(key(problem), []).append(problem)
    return parts


def _values(problems: Sequence[Problem], column: str) -> dict[str, list[Problem]]:
    """The problems of each value of a column, in the order of the values: numbers first, then texts."""
    there = [problem for problem in problems if problem.columns.get(column) is not None]
    found = _by(there, lambda problem: " ".join(str(problem.columns[column]).split()))

    def order(value: str) -> tuple[bool, Any]:
        first = found[value][0].columns[column]
        return (False, first) if isinstance(first, int | float) else (True, value)

    return {value: found[value] for value in sorted(found, key=order)}


def _label(name: str, first: Mapping[str, int]) -> str:
    label = name or "all"
    return f"{label} (first {first[name]})" if name in first else label

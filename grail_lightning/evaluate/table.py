"""The table of an evaluation, with 95 % intervals: what `test` prints, and what regrading prints anew.

Shapes: ``N`` problems, ``n`` samples of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

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


def evaluation_table(problems: Sequence[Problem], options: TableOptions) -> str:
    """The table: a line for each dataset, then both averages; lengths and failures likewise; and parts by column."""
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


_Parts = Mapping[str, Sequence[Problem]]
_Estimate = tuple[float, tuple[float, float]]  # A figure, and its limits.


def _accuracies(parts: _Parts, options: TableOptions, *, averages: bool) -> str:
    """The share of right samples, each pass@k and each maj@k; a row for each part, then for both averages."""
    averages = averages and len(parts) > 1
    everything = [problem for problems in parts.values() for problem in problems]
    whole = [*parts.values(), *([everything] if averages else [])]
    number = len(whole[0][0].correct)
    columns = {"problems": [str(len(problems)) for problems in whole]}
    columns[f"acc@{number}"] = _shares(parts, lambda problems: _passed(problems, 1), averages)
    if number > 1:
        columns["spread of runs"] = [_spread(problems) for problems in whole]
    for k in options.pass_at:
        columns[f"pass@{k}"] = _shares(parts, lambda problems, k=k: _passed(problems, k), averages)  # type: ignore[misc]
    for k in options.maj_at:
        columns[f"maj@{k}"] = _shares(parts, lambda problems, k=k: _voted(problems, k), averages)  # type: ignore[misc]
    return _lines(parts, columns)


def _responses(parts: _Parts) -> str:
    """Lengths in tokens, and the shares of responses that were cut, have no answer or could not be graded."""
    columns = {name: _lengths(parts, kind) for name, kind in LENGTHS.items()}
    for name, is_one in FAILURES.items():

        def failed(problems: Sequence[Problem], is_one: Callable[[Problem], Sequence[bool]] = is_one) -> _Estimate:
            return _passed(problems, 1, is_one)

        columns[name] = _shares(parts, failed, len(parts) > 1)
    return _lines(parts, columns)


def _shares(parts: _Parts, figure: Callable[[Sequence[Problem]], _Estimate], averages: bool) -> list[str]:
    """The cells of a share: of each part, weighted by size, and of all parts alike."""
    means, limits = zip(*(figure(problems) for problems in parts.values()), strict=True)
    cells = [_cell(*estimate) for estimate in zip(means, limits, strict=True)]
    if averages:
        sizes = [len(problems) for problems in parts.values()]
        for weights in ([size / sum(sizes) for size in sizes], [1 / len(sizes)] * len(sizes)):
            mean = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
            cells.append(_cell(mean, average_interval(means, limits, weights)))
    return cells


def _lengths(parts: _Parts, kind: bool | None) -> list[str]:
    """The cells of the mean length of all responses, or of the right or the wrong ones; "-" without any."""
    tokens, numbers = [], []
    for problems in parts.values():
        chosen = [[n for n, right in zip(p.lengths, p.correct, strict=True) if kind in (None, right)] for p in problems]
        tokens.append([sum(lengths) for lengths in chosen])
        numbers.append([len(lengths) for lengths in chosen])
    estimates = [_mean_length([y], [x]) for y, x in zip(tokens, numbers, strict=True)]
    means, limits = zip(*estimates, strict=True)
    known = not any(math.isnan(low) for low, _ in limits)
    average = average_interval(means, limits, most=math.inf) if known else (math.nan, math.nan)
    averages = [_mean_length(tokens, numbers), (sum(means) / len(means), average)] if len(parts) > 1 else []
    return ["-" if math.isnan(mean) else _cell(mean, limits, 1) for mean, limits in [*estimates, *averages]]


def _mean_length(tokens: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]]) -> _Estimate:
    total = sum(map(sum, numbers))
    return (sum(map(sum, tokens)) / total if total else math.nan), ratio_interval(tokens, numbers)


def _passed(
    problems: Sequence[Problem], k: int, is_one: Callable[[Problem], Sequence[bool]] = lambda problem: problem.correct
) -> _Estimate:
    """pass@k, of right samples or of others."""
    ones = torch.tensor([is_one(problem) for problem in problems])
    number, count = ones.shape[1], ones.sum(1)
    shares = pass_at_k(number, count, k)
    return float(shares.mean()), mean_interval(shares, pass_at_k_variance(number, count, k))


def _voted(problems: Sequence[Problem], k: int) -> _Estimate:
    """maj@k."""
    shares = torch.tensor([maj_at_k(problem.votes, problem.correct, k) for problem in problems], dtype=torch.float64)
    return float(shares.mean()), mean_interval(shares, vote_noise(shares, len(problems[0].correct), k))


def _spread(problems: Sequence[Problem]) -> str:
    """The population standard deviation of the accuracies of the sampling runs."""
    return f"{torch.tensor([problem.correct for problem in problems]).double().mean(0).std(correction=0):.3f}"


def _cell(mean: float, interval: tuple[float, float], digits: int = 3) -> str:
    low, high = ("-" if math.isnan(limit) else f"{limit:.{digits}f}" for limit in interval)
    return f"{mean:.{digits}f} [{low}, {high}]"


def _lines(parts: _Parts, columns: Mapping[str, list[str]]) -> str:
    """Aligned columns; those that have no figure for the simple average are empty there."""
    number = max(map(len, columns.values()))
    names = ["", *parts, "weighted by size", "simple average"][: number + 1]
    cells = [[head, *column, *[""] * (number - len(column))] for head, column in columns.items()]
    lines = [f"{name:{max(map(len, names))}}" for name in names]
    for column in cells:
        lines = [f"{line}  {cell:>{max(map(len, column))}}" for line, cell in zip(lines, column, strict=True)]
    return "\n".join(lines)


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

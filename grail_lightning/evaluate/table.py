"""The table of an evaluation, with 95 % intervals: what `test` prints, and what regrading prints anew.

Shapes: ``N`` problems, ``n`` samples of each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grail_lightning.evaluate.records import Problem
from grail_lightning.evaluate.seeds import estimate
from grail_lightning.evaluate.statistics import Floats, average_interval, ratio_interval, vote_noise
from grail_lightning.functional import maj_at_k, pass_at_k, pass_at_k_variance

ERRORS = ("capped", "unparseable", "timeout", "crashed")
"""The statuses with which the verifier could not compare an answer; they count as not right."""
AVERAGES = ("weighted by size", "simple average")
LENGTHS = {"mean tokens": None, "of right": True, "of wrong": False}
"""The columns of lengths: whether they are of right responses or of the others; None for all."""


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


def accuracies(
    problems: Sequence[Problem], pass_at: Sequence[int], maj_at: Sequence[int]
) -> dict[str, tuple[Floats, Floats]]:
    """acc@n, pass@k and maj@k of each problem ``[N]`` with the variance over other samples of the problem ``[N]``."""
    correct = torch.tensor([problem.correct for problem in problems])
    number, right = correct.shape[1], correct.sum(1)
    names = {f"acc@{number}": 1} | {f"pass@{k}": k for k in pass_at}
    figures = {
        name: (pass_at_k(number, right, k).numpy(), pass_at_k_variance(number, right, k).numpy())
        for name, k in names.items()
    }
    for k in maj_at:
        share = np.array([maj_at_k(problem.votes, problem.correct, k) for problem in problems], dtype=float)
        figures[f"maj@{k}"] = share, vote_noise(share, number, k)
    return figures


def failures(problems: Sequence[Problem]) -> dict[str, tuple[Floats, Floats]]:
    """The shares of samples that were cut, have no answer or could not be graded, with their variances ``[N]``."""
    statuses = np.array([problem.statuses for problem in problems])
    shares = {
        "truncated": ~np.array([problem.finished for problem in problems]),
        "no answer": statuses == "missing",
        "grading errors": np.isin(statuses, ERRORS),
    }
    return {name: (of.mean(1), of.astype(float).var(1) / of.shape[1]) for name, of in shares.items()}


def evaluation_table(problems: Sequence[Problem], options: TableOptions) -> str:
    """The table: a line for each dataset, then both averages; lengths and failures likewise; and parts by column."""
    parts: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        label = problem.dataset or "all"
        first = options.first.get(problem.dataset)
        parts[label if first is None else f"{label} (first {first})"].append(problem)
    blocks = [_solved(parts, options, averages=len(parts) > 1), _responses(parts)]
    for column in options.by:
        split = {
            f"{label}, {column} {value}": some for label, of in parts.items() for value, some in _split(of, column)
        }
        blocks.append(_solved(split, options, averages=False) if split else f"No problem has a column {column!r}.")
    return "\n\n".join([*blocks, "In brackets: 95 % intervals."])


def by_column(problems: Sequence[Problem], column: str) -> Iterator[tuple[str, str, list[Problem]]]:
    """The problems of each dataset and value of a column, with both; those without the column are left out."""
    for name in dict.fromkeys(problem.dataset for problem in problems):
        for value, some in _split([problem for problem in problems if problem.dataset == name], column):
            yield name, value, some


def _split(problems: Sequence[Problem], column: str) -> list[tuple[str, list[Problem]]]:
    """The problems of each value of a column, in the order of the values: numbers first, then texts."""
    parts: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if (value := problem.columns.get(column)) is not None:
            parts[" ".join(str(value).split())].append(problem)

    def order(part: tuple[str, list[Problem]]) -> tuple[bool, Any]:
        first = part[1][0].columns[column]
        return (False, first) if isinstance(first, int | float) else (True, part[0])

    return sorted(parts.items(), key=order)


_Parts = Mapping[str, Sequence[Problem]]


def _solved(parts: _Parts, options: TableOptions, *, averages: bool) -> str:
    """The share of right samples, each pass@k and each maj@k; a row for each part, then for both averages."""
    wholes = [*parts.values(), *([[p for problems in parts.values() for p in problems]] if averages else [])]
    figures = [accuracies(problems, options.pass_at, options.maj_at) for problems in parts.values()]
    columns = {"problems": [str(len(problems)) for problems in wholes]}
    for number, name in enumerate(figures[0]):
        columns[name] = _cells([figure[name] for figure in figures], averages)
        if number == 0 and len(wholes[0][0].correct) > 1:
            right = [np.array([problem.correct for problem in problems]) for problems in wholes]
            columns["spread of runs"] = [f"{of.mean(0).std():.3f}" for of in right]
    return _text(parts, columns)


def _responses(parts: _Parts) -> str:
    columns = {name: _lengths(parts, kind) for name, kind in LENGTHS.items()}
    shares = [failures(problems) for problems in parts.values()]
    columns |= {name: _cells([share[name] for share in shares], len(parts) > 1) for name in shares[0]}
    return _text(parts, columns)


def _cells(shares: Sequence[tuple[Floats, Floats]], averages: bool) -> list[str]:
    """The cells of a share: of each part, weighted by size, and of all parts alike."""
    tables, noises = [values[:, None] for values, _ in shares], [noise[:, None] for _, noise in shares]
    estimates = [estimate([table], [noise], [1.0]) for table, noise in zip(tables, noises, strict=True)]
    if averages:
        sizes = np.array([len(table) for table in tables])
        ways = (sizes / sizes.sum(), np.full(len(sizes), 1 / len(sizes)))
        estimates += [estimate(tables, noises, list(weights)) for weights in ways]
    return [_cell(one.value, (one.low, one.high)) for one in estimates]


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
    return ["-" if math.isnan(mean) else _cell(mean, interval, 1) for mean, interval in [*estimates, *averages]]


def _mean_length(
    tokens: Sequence[Sequence[int]], numbers: Sequence[Sequence[int]]
) -> tuple[float, tuple[float, float]]:
    total = sum(map(sum, numbers))
    return (sum(map(sum, tokens)) / total if total else math.nan), ratio_interval(tokens, numbers)


def _cell(mean: float, interval: tuple[float, float], digits: int = 3) -> str:
    low, high = ("-" if math.isnan(limit) else f"{limit:.{digits}f}" for limit in interval)
    return f"{mean:.{digits}f} [{low}, {high}]"


def _text(parts: _Parts, columns: Mapping[str, list[str]]) -> str:
    """Aligned columns; those that have no figure for the simple average are empty there."""
    rows = max(map(len, columns.values()))
    names = [*parts, *AVERAGES][:rows]
    return aligned({"": names} | {name: [*cells, *[""] * (rows - len(cells))] for name, cells in columns.items()})


def aligned(columns: Mapping[str, Sequence[str]]) -> str:
    """A table as text; the columns of names are aligned to the left, those of figures to the right."""
    lines: list[tuple[str, ...]] = []
    for name, cells in columns.items():
        width, side = max(map(len, [name, *cells])), "<" if name in ("", "method") else ">"
        lines.append(tuple(f"{cell:{side}{width}}" for cell in [name, *cells]))
    return "\n".join("  ".join(row).rstrip() for row in zip(*lines, strict=True))

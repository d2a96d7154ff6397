"""The table of an evaluation, with 95 % intervals: what `test` prints, and what regrading prints anew.

It is made of a frame of samples (`grail_lightning.app.results.records.sample_frame`). Shapes: ``N`` problems, ``n``
samples of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torchmetrics import MetricCollection

from grail_lightning.answers.records import UNSCORED
from grail_lightning.app.results.records import judged
from grail_lightning.app.results.statistics import Floats, Interval, Share, average_interval, estimate, ratio_interval
from grail_lightning.core.metrics import problem_metrics

_ERRORS = ("capped", "unparseable", "timeout", "crashed")  # The verifier could not compare the answer; not right.
_LENGTHS = {"mean tokens": None, "of right": True, "of wrong": False}  # Which responses: None for all.


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What the table shows: the k of each pass@k and of each maj@k, and the columns of the data `by` which it is split.

    `first` is the number of rows of each dataset that is not evaluated as a whole.
    """

    pass_at: Sequence[int] = ()
    maj_at: Sequence[int] = ()
    by: Sequence[str] = ()
    first: Mapping[str, int] = field(default_factory=dict)


def by_problem(samples: pd.DataFrame, column: str) -> NDArray[Any]:
    """A column of a frame of samples as ``[N, n]``: all problems have the same number of samples."""
    values: NDArray[Any] = samples[column].to_numpy().reshape(-1, samples["sample"].max() + 1)
    return values


def measured(samples: pd.DataFrame, pass_at: Sequence[int], maj_at: Sequence[int]) -> MetricCollection:
    """The metrics of `problem_metrics` of a frame of samples, those of a problem being neighbours, from the first on.

    The column ``vote`` is needed for maj@k alone.
    """
    metrics = problem_metrics(pass_at, maj_at, sync_on_compute=False)
    columns = {"correct": samples["correct"], "group": (samples["sample"] == 0).cumsum()}
    columns |= {"votes": samples["vote"]} if maj_at else {}
    metrics.update(**{name: torch.tensor(column.to_numpy()) for name, column in columns.items()})
    return metrics


def accuracies(samples: pd.DataFrame, pass_at: Sequence[int], maj_at: Sequence[int]) -> dict[str, Share]:
    """acc@n, pass@k and maj@k by name."""
    metrics: dict[str, Any] = dict(measured(samples, pass_at, maj_at).items())
    names = {f"acc@{samples['sample'].max() + 1}": "accuracy"}
    names |= {f"pass@{k}": f"pass_at_{k}" for k in pass_at} | {f"maj@{k}": f"maj_at_{k}" for k in maj_at}
    shares = {name: metrics[metric].share() for name, metric in names.items()}
    return {name: (values.numpy(), noise.numpy()) for name, (values, noise) in shares.items()}


def failures(samples: pd.DataFrame) -> dict[str, Share]:
    """The shares of samples that were cut, have no answer or could not be graded, by name."""
    statuses = by_problem(samples, "status")
    shares = {
        "truncated": ~by_problem(samples, "finished"),
        "no answer": statuses == "missing",
        "grading errors": np.isin(statuses.astype(str), _ERRORS),
    }
    return {name: (values.mean(1), values.astype(float).var(1) / values.shape[1]) for name, values in shares.items()}


def parts_of(sizes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The weights of datasets by name: of each alone, and if there are several, of both averages of all."""
    parts = {name: {name: 1.0} for name in sizes}
    if len(sizes) > 1:
        by_size = {name: size / sum(sizes.values()) for name, size in sizes.items()}
        averages = {"weighted by size": by_size, "simple average": dict.fromkeys(sizes, 1 / len(sizes))}
        # A dataset may have one of these names.
        parts |= {f"{name} of all" if name in sizes else name: weights for name, weights in averages.items()}
    return parts


def plain(text: object, longest: int = 80) -> str:
    """A text without control characters, which are written out, and of at most so many characters."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def markdown(text: object) -> str:
    """The text for a cell or a line of Markdown, in which it is neither Markdown nor HTML."""
    return re.sub(r"([\\`*_{}<>|#~&]|\](?=[(\[:]))", r"\\\1", str(text))


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], names: int = 1, escape: Callable[[object], str] = markdown
) -> str:
    """A table of Markdown, whose texts are escaped: `names` columns of text, then columns of figures to the right."""
    rule = ["---"] * names + ["--:"] * (len(head) - names)
    lines = [list(map(escape, head)), rule, *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def label(dataset: str, first: int | None) -> str:
    """The name of a dataset, and how many rows of it were evaluated if not all."""
    return (plain(dataset) or "all") + ("" if first is None else f" (first {first})")


def by_column(samples: pd.DataFrame, column: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The samples of each dataset and value of a column, with both; problems without the column are left out.

    Values that are numbers come first, in their order, then texts.
    """
    values = pd.Series([columns.get(column) for columns in samples["columns"]], samples.index, dtype=object)
    texts = values.map(lambda value: plain(" ".join(str(value).split()), 10_000))
    for dataset, rows in samples[values.notna()].groupby("dataset", sort=False):
        first = dict(zip(texts[rows.index], values[rows.index], strict=True))
        for text in sorted(first, key=lambda text: (isinstance(first[text], str), first[text])):
            yield str(dataset), text, rows[texts[rows.index] == text]


def evaluation_table(samples: pd.DataFrame, options: TableOptions) -> str:
    """The table: a line for each dataset, then both averages; lengths and failures likewise; and parts by column."""
    labels = {name: label(name, options.first.get(name)) for name in samples["dataset"].unique()}
    datasets = {text: samples[samples["dataset"] == name] for name, text in labels.items()}
    averaged = parts_of({label: len(rows) for label, rows in datasets.items()})
    judged_samples = judged(samples)
    solved = {
        text: rows for name, text in labels.items() if len(rows := judged_samples[judged_samples["dataset"] == name])
    }
    blocks = (
        [_solved(solved, parts_of({label: len(rows) for label, rows in solved.items()}), options)] if solved else []
    )
    if number := (samples["sample"] == 0).sum() - (judged_samples["sample"] == 0).sum():
        blocks.append(f"Left out of the accuracy: {number} problems with a response that is `unscored`.")
    blocks.append(_responses(datasets, averaged))
    for column in options.by:
        split = {f"{labels[name]}, {column} {text}": rows for name, text, rows in by_column(judged_samples, column)}
        alone = {name: {name: 1.0} for name in split}
        blocks.append(_solved(split, alone, options) if split else f"No problem has a text or number {column!r}.")
    return "\n\n".join([*blocks, "In brackets: 95 % intervals."])


def as_text(table: pd.DataFrame) -> str:
    """A table in aligned columns, with two spaces between them."""
    lines = table.to_string(col_space=[len(name) + 1 for name in table.columns]).splitlines()
    return "\n".join(line.rstrip() for line in lines)


_Parts = Mapping[str, pd.DataFrame]
_Weights = Mapping[str, Mapping[str, float]]


def _solved(parts: _Parts, rows: _Weights, options: TableOptions) -> str:
    """The share of right samples, each pass@k and each maj@k; a row for each part, then for both averages."""
    table = _cells({name: accuracies(values, options.pass_at, options.maj_at) for name, values in parts.items()}, rows)
    # The simple average is that of no set of problems.
    sets = {
        row: pd.concat([parts[n] for n in weights])
        for row, weights in rows.items()
        if row in parts or not row.startswith("simple average")
    }
    correct = {row: by_problem(values, "correct") for row, values in sets.items()}
    table.insert(0, "problems", pd.Series({row: str(len(values)) for row, values in correct.items()}))
    if "acc@1" not in table:
        table.insert(
            2, "spread of runs", pd.Series({row: f"{values.mean(0).std():.3f}" for row, values in correct.items()})
        )
    return as_text(table.fillna(""))


def _responses(parts: _Parts, rows: _Weights) -> str:
    lengths = pd.DataFrame({name: _lengths(parts, wanted) for name, wanted in _LENGTHS.items()}, index=list(rows))
    return as_text(lengths.join(_cells({name: failures(samples) for name, samples in parts.items()}, rows)))


def _cells(shares: Mapping[str, Mapping[str, Share]], rows: _Weights) -> pd.DataFrame:
    """The cells of shares, of which each part has the same: a row for each part and average, a column for each."""

    def cell(figure: str, weights: Mapping[str, float]) -> str:
        parts = [(values[:, None], noise[:, None]) for values, noise in (shares[name][figure] for name in weights)]
        interval = estimate(parts, list(weights.values()))
        return _cell(interval.value, (interval.low, interval.high))

    figures = next(iter(shares.values()))
    return pd.DataFrame({figure: {row: cell(figure, part) for row, part in rows.items()} for figure in figures})


def _lengths(parts: _Parts, wanted: bool | None) -> list[str]:
    """The cells of the mean length of all responses, or of the right or the wrong ones; "-" without any."""
    totals = []
    for samples in parts.values():
        right = by_problem(samples, "correct")
        has_verdict = by_problem(samples, "status") != UNSCORED
        chosen = np.full_like(right, True) if wanted is None else (right == wanted) & has_verdict
        totals.append(((by_problem(samples, "num_tokens") * chosen).sum(1), chosen.sum(1)))
    cells = [_mean_length([total]) for total in totals]
    if len(parts) > 1:
        means, limits = zip(*cells, strict=True)
        average = average_interval(means, limits, [1 / len(means)] * len(means))
        cells += [_mean_length(totals), (sum(means) / len(means), average)]
    return ["-" if math.isnan(mean) else _cell(mean, interval, 1) for mean, interval in cells]


def _mean_length(totals: Sequence[tuple[Floats, Floats]]) -> tuple[float, Interval]:
    """The mean length and its interval, from the tokens and the number of responses of each dataset's problems."""
    sums, counts = zip(*totals, strict=True)
    number = sum(int(x.sum()) for x in counts)
    return (sum(int(y.sum()) for y in sums) / number if number else math.nan), ratio_interval(sums, counts)


def _cell(mean: float, interval: Interval, digits: int = 3) -> str:
    low, high = ("-" if math.isnan(limit) else f"{limit:.{digits}f}" for limit in interval)
    return f"{mean:.{digits}f} [{low}, {high}]"

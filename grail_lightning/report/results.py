"""The figures of methods with intervals, and their differences from a baseline.

Shapes: ``N`` problems, ``n`` samples of each, ``S`` seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from grail_lightning.evaluation.comparison import Estimate, difference, estimate
from grail_lightning.evaluation.statistics import Floats, vote_noise
from grail_lightning.functional import maj_at_k, pass_at_k, pass_at_k_variance
from grail_lightning.report.figures import Compared, with_corrected
from grail_lightning.report.methods import Method, paired_places
from grail_lightning.report.runs import mapping
from grail_lightning.report.samples import Responses, check_comparable, common_problems, read_responses

AVERAGES = ("simple average", "weighted by size")
# The published protocol counts tokens up to this limit if the samples do not say theirs.
_LONGEST = 1 << 20


class Shares(NamedTuple):
    """A figure of each problem and seed, ``[N, S]``, and its variance over other samples of the problem, ``[N, S]``."""

    values: Floats
    noise: Floats

    def only(self, seeds: Sequence[int]) -> Shares:
        """Those of the seeds at these places."""
        return Shares(self.values[:, list(seeds)], self.noise[:, list(seeds)])


@dataclass(frozen=True, kw_only=True)
class Line(Compared):
    """A figure of one method on one dataset, or averaged over datasets.

    Attributes:
        dataset: The dataset's name with the part of it that was evaluated, or one of `AVERAGES`.
        average: Whether it is an average over datasets.
        problems: The number of problems.
        figure: The figure's name, such as ``acc@3``.
    """

    dataset: str
    average: bool
    problems: int
    figure: str


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Methods on the same problems.

    Attributes:
        methods: The methods that have samples.
        datasets: The problems' datasets.
        labels: What a table says of each dataset: its name, and the part of it that was evaluated.
        responses: For each method and dataset one `Responses` a seed, with the problems in the same order.
        num_samples: The samples of each problem, ``n``.
        longest: The largest number of tokens of a response.
    """

    methods: list[Method]
    datasets: list[str]
    labels: dict[str, str]
    responses: dict[str, dict[str, list[Responses]]]
    num_samples: int
    longest: int


def read_evaluated(methods: Sequence[Method], *, common: bool, votes: bool = False) -> Evaluated | None:
    """The samples of all methods that have some; None if none has.

    Args:
        methods: The methods of one task.
        common: Whether to keep only the problems that all runs have.
        votes: Whether to group equal answers, for majority votes.

    Raises:
        ValueError: If the runs cannot be compared.
    """
    with_samples = [method for method in methods if method.evaluated]
    runs = [run for method in with_samples for run in method.evaluated]
    if not runs:
        return None
    check_comparable(runs, common=common)
    read = {id(run): read_responses(run, complete=not common, votes=votes) for run in runs}
    problems = common_problems(list(read.values()))
    about = runs[0].facts["datasets"]
    responses = {
        method.name: {
            dataset: [read[id(run)][dataset].only(keys) for run in method.evaluated]
            for dataset, keys in problems.items()
        }
        for method in with_samples
    }
    longest = mapping(runs[0].facts.get("sampling")).get("max_response_length")
    return Evaluated(
        methods=with_samples,
        datasets=list(problems),
        labels={name: _label(name, len(keys), about[name], common) for name, keys in problems.items()},
        responses=responses,
        num_samples=int(runs[0].facts["num_samples"]),
        longest=longest if isinstance(longest, int) and longest > 0 else _LONGEST,
    )


def _label(name: str, number: int, about: Mapping[str, object], common: bool) -> str:
    """The name, and which part of the dataset this is."""
    said = []
    if about.get("first") is not None:
        said.append(f"first {about['first']}")
    if common and number != about["problems"]:
        said.append(f"{number} in common")
    return (name or "all") + (f" ({', '.join(said)})" if said else "")


def compared(
    evaluated: Evaluated, baseline: str, pass_at: Sequence[int] = (), maj_at: Sequence[int] = ()
) -> list[Line]:
    """The lines of acc@n, of each pass@k and of each maj@k, with differences from the baseline.

    The p-values of a figure are corrected within the datasets together, and within each average.

    Args:
        evaluated: The methods.
        baseline: The name of one of them.
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k; for them the samples must have been read with votes.
    """
    figures = {f"acc@{evaluated.num_samples}": partial(_solved, k=1)}
    figures |= {f"pass@{k}": partial(_solved, k=k) for k in pass_at}
    figures |= {f"maj@{k}": partial(_voted, k=k) for k in maj_at}
    found: list[Line] = []
    for name, shares in figures.items():
        lines = _lines(evaluated, name, shares, baseline)
        # The datasets, which come first, are one family together; each average is another.
        for _, family in groupby(lines, key=lambda line: line.dataset if line.average else ""):
            found += with_corrected(list(family))
    return found


def described(evaluated: Evaluated) -> list[Line]:
    """The lines of the responses themselves: mean length, and the shares that were cut and that have no answer."""

    def length(responses: Responses) -> Shares:
        """As a share of the limit, so that it has the interval of a share."""
        values = responses.lengths / evaluated.longest
        return _column(values.mean(1), values.var(1) / values.shape[1])

    lengths = [
        replace(line, estimate=_scaled(line.estimate, evaluated.longest))
        for line in _lines(evaluated, "tokens", length, None)
    ]
    truncated = _lines(evaluated, "truncated", lambda responses: _share_of(~responses.finished), None)
    return lengths + truncated + _lines(evaluated, "no answer", lambda responses: _share_of(responses.missing), None)


def _lines(
    evaluated: Evaluated, figure: str, shares: Callable[[Responses], Shares], baseline: str | None
) -> list[Line]:
    """One line for each dataset and method, then for each average and method."""
    tables = {
        (method, dataset): _joined([shares(one) for one in seeds])
        for method, datasets in evaluated.responses.items()
        for dataset, seeds in datasets.items()
    }
    sizes = {dataset: len(tables[evaluated.methods[0].name, dataset].values) for dataset in evaluated.datasets}
    total = sum(sizes.values())
    parts = [(label, [name], [1.0]) for name, label in evaluated.labels.items()]
    if len(sizes) > 1:
        weighted = [size / total for size in sizes.values()]
        ways = ([1 / len(sizes)] * len(sizes), weighted)
        parts += [(name, list(sizes), way) for name, way in zip(AVERAGES, ways, strict=True)]
    by_name = {method.name: method for method in evaluated.methods}
    found = []
    for label, datasets, weights in parts:
        for method in evaluated.methods:
            ours = [tables[method.name, dataset] for dataset in datasets]
            line = Line(
                dataset=label,
                average=len(datasets) > 1,
                method=method.name,
                seeds=len(method.evaluated),
                problems=sum(sizes[dataset] for dataset in datasets),
                figure=figure,
                estimate=estimate([t.values for t in ours], [t.noise for t in ours], weights),
            )
            if baseline is not None and method.name != baseline:
                theirs = [tables[baseline, dataset] for dataset in datasets]
                seeds = [[run.seed for run in one.evaluated] for one in (method, by_name[baseline])]
                if places := paired_places(*seeds):
                    ours, theirs = ([t.only(kept) for t in of] for of, kept in zip((ours, theirs), places, strict=True))
                found_difference = difference(
                    [t.values for t in ours],
                    [t.values for t in theirs],
                    [(a.noise, b.noise) for a, b in zip(ours, theirs, strict=True)],
                    weights,
                    paired_seeds=places is not None,
                )
                line = replace(line, difference=found_difference, pairs=len(places[0]) if places else None)
            found.append(line)
    return found


def _solved(responses: Responses, k: int) -> Shares:
    right = torch.from_numpy(responses.correct.sum(1))
    number = responses.correct.shape[1]
    return _column(pass_at_k(number, right, k).numpy(), pass_at_k_variance(number, right, k).numpy())


def _voted(responses: Responses, k: int) -> Shares:
    rows = zip(responses.votes.tolist(), responses.correct.tolist(), strict=True)
    share = np.array([maj_at_k(votes, correct, k) for votes, correct in rows])
    return _column(share, vote_noise(share, responses.votes.shape[1], k))


def _share_of(samples: np.typing.NDArray[np.bool_]) -> Shares:
    share = samples.mean(1)
    return _column(share, share * (1 - share) / samples.shape[1])


def _column(values: Floats, noise: Floats) -> Shares:
    return Shares(values[:, None].astype(float), noise[:, None].astype(float))


def _joined(seeds: Sequence[Shares]) -> Shares:
    return Shares(np.hstack([s.values for s in seeds]), np.hstack([s.noise for s in seeds]))


def _scaled(found: Estimate, scale: float) -> Estimate:
    return Estimate(value=found.value * scale, low=found.low * scale, high=found.high * scale)

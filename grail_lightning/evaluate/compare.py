"""The figures of methods on the same problems, with intervals, and their differences from a baseline.

Shapes: ``N`` problems, ``S`` seeds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from grail_lightning.evaluate.records import Problem, Sample, problems_of, read_samples
from grail_lightning.evaluate.runs import Run, paired_seeds
from grail_lightning.evaluate.seeds import difference, estimate
from grail_lightning.evaluate.statistics import Floats, holm
from grail_lightning.evaluate.table import AVERAGES, accuracies, failures

Share = tuple[Floats, Floats]
"""A figure of each problem (and seed), and its variance over other samples of the problem."""


def check_comparable(runs: Sequence[Run], *, common: bool) -> None:
    """Refuse runs that were evaluated with other settings, or on other problems unless only `common` ones count."""
    for run in runs[1:]:
        one, two = _settings(runs[0].facts, common), _settings(run.facts, common)
        names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if common:  # Of datasets that only one has nothing is compared.
            names = [name for name in names if not name.startswith("grading") or (name in one and name in two)]
        if names:
            remedy = ", or compare the problems that all runs have: --common" if names[0].startswith("prob") else ""
            differ = "; ".join(f"`{name}` ({one.get(name)!r:.100}, {two.get(name)!r:.100})" for name in names)
            raise ValueError(
                f"Runs can be compared only on the same problems with the same settings, but {runs[0].samples} and "
                f"{run.samples} differ in {differ}. Test them with the same config{remedy}."
            )


def _settings(facts: Mapping[str, Any], common: bool) -> dict[str, Any]:
    """What must be the same in two evaluations, by name."""
    settings = {"num_samples": facts["num_samples"]}
    settings |= {f"sampling.{name}": value for name, value in (facts.get("sampling") or {}).items()}
    settings |= {f"grading of {name}": value for name, value in (facts.get("grading") or {}).items()}
    if not common:
        for name, about in facts["datasets"].items():
            settings[f"problems of {name}"] = f"{about['problems']} problems, digest {about['digest']}"
    return settings


def read_problems(runs: Sequence[Run], *, common: bool, votes: bool) -> pd.DataFrame:
    """The problems of runs that have samples: a row for each run and problem.

    The columns are ``method``, ``seed`` (the number of the run in its method), ``dataset``, ``identity``, ``number``
    (among equal problems) and ``problem``, a `Problem`. Every run has the same problems.
    """
    rows, of_method = [], Counter[str]()
    for run in runs:
        assert run.samples is not None
        counts, equal = Counter[str](), Counter[tuple[str, str]]()
        for identity, problem in _whole_problems(run, votes=votes):
            place = problem.dataset, identity
            rows.append((run.method, of_method[run.method], *place, equal[place], problem))
            counts[problem.dataset] += 1
            equal[place] += 1
        of_method[run.method] += 1
        for dataset, about in run.facts["datasets"].items():
            if counts[dataset] != about["problems"] and not common:
                raise ValueError(
                    f"{run.samples} must hold all {about['problems']} problems of {dataset or 'its data'} with "
                    f"{run.facts['num_samples']} samples each, but it holds {counts[dataset]}. Run the same `test` "
                    "again, which continues it, or compare the problems that all runs have: --common."
                )
    frame = pd.DataFrame(rows, columns=["method", "seed", "dataset", "identity", "number", "problem"])
    shared = frame.groupby(["dataset", "identity", "number"])["problem"].transform("size") == len(runs)
    if not shared.any():
        raise ValueError("The runs must have problems in common, but there is none. Test them on the same data.")
    return frame[shared]


def _whole_problems(run: Run, *, votes: bool) -> list[tuple[str, Problem]]:
    """The identity and the verdicts of every problem that has all its samples, in the order of the data."""
    assert run.samples is not None
    places: dict[tuple[str, int], dict[int, Sample]] = defaultdict(dict)
    for sample in read_samples(run.samples):
        kept = sample if votes else replace(sample, prediction=None)  # Grouping equal answers takes long.
        places[sample.dataset, sample.index].setdefault(sample.sample, kept)
    grading, problems = run.facts.get("grading") or {}, []
    for (dataset, _), samples in sorted(places.items()):
        if samples.keys() == set(range(run.facts["num_samples"])):
            compare = grading.get(dataset, {}).get("compare", "math")
            (problem,) = problems_of((samples[k] for k in sorted(samples)), compare)
            problems.append((samples[0].problem, problem))
    return problems


def compare(
    runs: Sequence[Run], baseline: str, pass_at: Sequence[int], maj_at: Sequence[int], *, common: bool = False
) -> pd.DataFrame:
    """The figures of methods with intervals, and of acc@n, pass@k and maj@k the differences from a baseline.

    Args:
        runs: The runs, with methods (`with_methods`) and samples.
        baseline: The name of one of the methods.
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        common: Whether only the problems are compared that all runs have.
    """
    check_comparable(runs, common=common)
    frame = read_problems(runs, common=common, votes=bool(maj_at))
    seeds: dict[str, list[int | None]] = defaultdict(list)
    for run in runs:
        seeds[run.method].append(run.seed)
    sizes = {name: int((frame["dataset"] == name).sum()) // len(runs) for name in frame["dataset"].unique()}
    about = runs[0].facts["datasets"]
    parts = [(_label(name, size, about[name]), [name], [1.0]) for name, size in sizes.items()]
    if len(sizes) > 1:
        ways = [[1 / len(sizes)] * len(sizes), [size / sum(sizes.values()) for size in sizes.values()]]
        parts += [(label, list(sizes), weights) for label, weights in zip(reversed(AVERAGES), ways, strict=True)]
    limit = float((runs[0].facts.get("sampling") or {}).get("max_response_length") or 1 << 20)
    rows: list[dict[str, Any]] = []
    for figure, (values, noise) in _figures(list(frame["problem"]), pass_at, maj_at, limit).items():
        key, columns = ["dataset", "identity", "number"], ["method", "seed"]
        tables = frame.assign(values=values, noise=noise).pivot(index=key, columns=columns, values=["values", "noise"])
        tested = baseline if figure[:3] in ("acc", "pas", "maj") else None
        for label, datasets, weights in parts:
            part = "average" if label in AVERAGES and len(sizes) > 1 else "dataset"
            known = {
                "part": part,
                "dataset": label,
                "figure": figure,
                "problems": sum(sizes[name] for name in datasets),
            }
            shares = {name: _shares(tables, datasets, name) for name in seeds}
            scale = limit if figure == "tokens" else 1.0
            rows += [known | row for row in _compared(shares, seeds, weights, tested, scale)]
    return with_corrected(pd.DataFrame(rows))


def _label(name: str, size: int, about: Mapping[str, Any]) -> str:
    """The name of a dataset, and which part of it was evaluated."""
    parts = [f"first {about['first']}"] if about.get("first") is not None else []
    parts += [f"{size} in common"] if size != about["problems"] else []
    return (name or "all") + (f" ({', '.join(parts)})" if parts else "")


def _figures(
    problems: Sequence[Problem], pass_at: Sequence[int], maj_at: Sequence[int], limit: float
) -> dict[str, Share]:
    """Each figure of each problem with its variance over other samples ``[N]``, by name."""
    # Lengths are shares of the limit, so that they have the interval of a share.
    tokens = np.array([problem.lengths for problem in problems]) / limit
    figures = accuracies(problems, pass_at, maj_at) | {"tokens": (tokens.mean(1), tokens.var(1) / tokens.shape[1])}
    return figures | {name: of for name, of in failures(problems).items() if name != "grading errors"}


def _shares(tables: pd.DataFrame, datasets: Sequence[str], method: str) -> list[Share]:
    """A figure of a method on each dataset."""
    parts = [tables.loc[name] for name in datasets]
    return [(part["values"][method].to_numpy(float), part["noise"][method].to_numpy(float)) for part in parts]


def _compared(
    shares: Mapping[str, Sequence[Share]],
    seeds: Mapping[str, Sequence[int | None]],
    weights: Sequence[float],
    baseline: str | None,
    scale: float,
) -> list[dict[str, Any]]:
    """One row for each method: its figure, and its difference from the baseline if there is one."""
    rows = []
    for method, ours in shares.items():
        result = estimate([values for values, _ in ours], [noise for _, noise in ours], weights)
        row = {"method": method, "seeds": len(seeds[method]), "value": result.value * scale}
        row |= {"low": result.low * scale, "high": result.high * scale, "tested": None, "paired_seeds": math.nan}
        if baseline not in (None, method):
            theirs = shares[str(baseline)]
            if places := paired_seeds(seeds[method], seeds[str(baseline)]):
                mine, other = (list(kept) for kept in zip(*places, strict=True))
                ours = [(values[:, mine], noise[:, mine]) for values, noise in ours]
                theirs = [(values[:, other], noise[:, other]) for values, noise in theirs]
                row["paired_seeds"] = len(places)
            noises = [(one, two) for (_, one), (_, two) in zip(ours, theirs, strict=True)]
            tables, base = ([values for values, _ in of] for of in (ours, theirs))
            row |= {"baseline": baseline, "tested": difference(tables, base, noises, weights, bool(places))}
        rows.append(row)
    return rows


def with_corrected(frame: pd.DataFrame) -> pd.DataFrame:
    """The figures with their differences, p-values corrected for the number of comparisons, and what could be shown.

    The datasets of a figure (times methods) are one family; each average is a family of its own.
    """
    family = frame["figure"] + frame["dataset"].where(frame["part"] == "average", "")
    for _, rows in frame[frame["tested"].notna()].groupby(family):
        corrected = holm([tested.p_value for tested in rows["tested"]])
        for place, tested, p_value in zip(rows.index, rows["tested"], corrected, strict=True):
            # Seeds that differ all alike tell nothing of what could be shown.
            least = math.nan if math.isnan(tested.low) else tested.detectable(len(rows))
            cells = (tested.value, tested.low, tested.high, tested.p_value, p_value, least)
            frame.loc[place, ["difference", "difference_low", "difference_high", "p", "p_holm", "detectable"]] = cells
    return frame.drop(columns="tested")

"""The figures of methods on the same problems, with intervals, and their differences from a baseline.

Shapes: ``N`` problems, ``S`` seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grail_lightning.evaluate.records import Problem, read_samples, unequal, whole_problems
from grail_lightning.evaluate.runs import Run, paired_seeds
from grail_lightning.evaluate.statistics import difference, estimate, holm
from grail_lightning.evaluate.table import Share, accuracies, failures, parts_of

_KEY = ["dataset", "identity", "number"]  # Of a problem; the number tells equal ones apart.


def compare(
    runs: Sequence[Run], baseline: str, pass_at: Sequence[int], maj_at: Sequence[int], *, common: bool = False
) -> pd.DataFrame:
    """The figures of methods with intervals, and of acc@n, pass@k and maj@k the differences from a baseline.

    A row has the columns ``part`` (dataset or average), ``dataset``, ``figure``, ``problems``, ``method``, ``seeds``,
    ``value``, ``low``, ``high``, ``baseline``, ``paired_seeds``, and those of `with_corrected`.

    Args:
        runs: The runs (`find_runs`), all with samples.
        baseline: The name of one of the methods.
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        common: Whether only the problems are compared that all runs have.

    Raises:
        ValueError: If the runs were evaluated with other settings, or on other problems and not `common`.
    """
    _check_comparable(runs, common=common)
    frame = _read_problems(runs, common=common, votes=bool(maj_at))
    sizes = {name: len(rows) // len(runs) for name, rows in frame.groupby("dataset", sort=False)}
    limit = float((runs[0].facts.get("sampling") or {}).get("max_response_length") or 1 << 20)
    rows: list[dict[str, Any]] = []
    for figure, (values, noise) in _figures(list(frame["problem"]), pass_at, maj_at, limit).items():
        columns = {"index": _KEY, "columns": ["method", "seed"], "values": ["values", "noise"]}
        tables = frame.assign(values=values, noise=noise).pivot(**columns)
        for part, weights in parts_of(sizes).items():
            known = {
                "part": "dataset" if part in weights else "average",
                "dataset": _label(part, sizes[part], runs[0].facts["datasets"][part]) if part in weights else part,
                "figure": figure,
                "problems": sum(sizes[name] for name in weights),
            }
            tested = baseline if "@" in figure else None
            rows += [known | row for row in _methods(runs, tables, weights, tested, limit if figure == "tokens" else 1)]
    return with_corrected(pd.DataFrame(rows))


def _check_comparable(runs: Sequence[Run], *, common: bool) -> None:
    """Refuse runs that were evaluated with other settings, or on other problems unless only `common` ones count."""
    for run in runs[1:]:
        one, two = _settings(runs[0].facts, common), _settings(run.facts, common)
        differ = unequal(one, two)
        if common:  # Of datasets that only one has nothing is compared.
            shared = one.keys() & two.keys()
            differ = {name: both for name, both in differ.items() if name in shared or not name.startswith("grading")}
        if differ:
            problems = next(iter(differ)).startswith("problems")
            remedy = ", or compare the problems that all runs have: --common" if problems else ""
            raise ValueError(
                f"Runs can be compared only on the same problems with the same settings, but {runs[0].samples} and "
                f"{run.samples} differ in {'; '.join(differ.values())}. Test them with the same config{remedy}."
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


def _read_problems(runs: Sequence[Run], *, common: bool, votes: bool) -> pd.DataFrame:
    """A row for each run and problem, of the problems that all runs have: ``method``, `_KEY` and ``problem``.

    ``seed`` is the number of the run in its method.
    """
    rows, of_method = [], Counter[str]()
    for run in runs:
        assert run.samples is not None
        problems = whole_problems(read_samples(run.samples), run.facts, votes=votes)
        rows += [(run.method, of_method[run.method], p.dataset, p.identity, p) for p in problems]
        of_method[run.method] += 1
        for dataset, about in run.facts["datasets"].items():
            number = sum(problem.dataset == dataset for problem in problems)
            if number != about["problems"] and not common:
                raise ValueError(
                    f"{run.samples} must hold all {about['problems']} problems of {dataset or 'its data'} with "
                    f"{run.facts['num_samples']} samples each, but it holds {number}. Run the same `test` "
                    "again, which continues it, or compare the problems that all runs have: --common."
                )
    frame = pd.DataFrame(rows, columns=["method", "seed", "dataset", "identity", "problem"])
    frame["number"] = frame.groupby(["method", "seed", "dataset", "identity"]).cumcount()
    shared = frame.groupby(_KEY)["problem"].transform("size") == len(runs)
    if not shared.any():
        raise ValueError("The runs must have problems in common, but there is none. Test them on the same data.")
    return frame[shared]


def _label(name: str, size: int, about: Mapping[str, Any]) -> str:
    """The name of a dataset, and which part of it was evaluated."""
    parts = [f"first {about['first']}"] if about.get("first") is not None else []
    parts += [f"{size} in common"] if size != about["problems"] else []
    return (name or "all") + (f" ({', '.join(parts)})" if parts else "")


def _figures(
    problems: Sequence[Problem], pass_at: Sequence[int], maj_at: Sequence[int], limit: float
) -> dict[str, Share]:
    # Lengths are shares of the limit, so that they have the interval of a share.
    tokens = np.array([problem.lengths for problem in problems]) / limit
    figures = accuracies(problems, pass_at, maj_at) | {"tokens": (tokens.mean(1), tokens.var(1) / tokens.shape[1])}
    return figures | {name: of for name, of in failures(problems).items() if name != "grading errors"}


def _methods(
    runs: Sequence[Run], tables: pd.DataFrame, weights: Mapping[str, float], baseline: str | None, scale: float
) -> list[dict[str, Any]]:
    """One row for each method: its figure, and its difference from the baseline if there is one."""
    seeds: dict[str, list[int | None]] = {}
    for run in runs:
        seeds.setdefault(run.method, []).append(run.seed)
    parts, rows = [tables.loc[name] for name in weights], []
    shares = {m: [(of["values"][m].to_numpy(float), of["noise"][m].to_numpy(float)) for of in parts] for m in seeds}
    for method, ours in shares.items():
        result = estimate([values for values, _ in ours], [noise for _, noise in ours], list(weights.values()))
        row = {"method": method, "seeds": len(seeds[method]), "value": result.value * scale}
        row |= {"low": result.low * scale, "high": result.high * scale, "tested": None, "paired_seeds": math.nan}
        if baseline not in (None, method):
            theirs = shares[str(baseline)]
            if places := paired_seeds(seeds[method], seeds[str(baseline)]):
                mine, other = (list(seeds_of) for seeds_of in zip(*places, strict=True))
                ours = [(values[:, mine], noise[:, mine]) for values, noise in ours]
                theirs = [(values[:, other], noise[:, other]) for values, noise in theirs]
                row["paired_seeds"] = len(places)
            noises = [(one, two) for (_, one), (_, two) in zip(ours, theirs, strict=True)]
            values, base = ([values for values, _ in of] for of in (ours, theirs))
            tested = difference(values, base, noises, list(weights.values()), bool(places))
            row |= {"baseline": baseline, "tested": tested}
        rows.append(row)
    return rows


def with_corrected(frame: pd.DataFrame) -> pd.DataFrame:
    """Figures with the columns of their differences in place of ``tested``, which holds a `Difference` or None.

    They are ``difference``, ``difference_low``, ``difference_high``, ``p``, ``p_holm`` (corrected for the number of
    comparisons) and ``detectable``. The datasets of a figure (times methods) are one family; each average is its own.
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

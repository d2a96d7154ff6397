"""The figures of methods on the same problems, their learning curves, and their differences from a baseline.

Shapes: ``N`` problems, ``S`` seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grail_lightning.app.results.records import flat, read_samples, sample_frame, unequal
from grail_lightning.app.results.runs import LoggedRun, paired_seeds
from grail_lightning.app.results.statistics import Share, difference, estimate, holm, seeds_difference, seeds_estimate
from grail_lightning.app.results.table import accuracies, by_problem, failures, label, parts_of

CURVE = "val/accuracy"
# Options of the data that change training but not the problems of its validations.
_TRAINING = re.compile(
    r"(train|num_train|test|num_test|prompts_per_batch|eval_prompts_per_batch|curriculum|kept|task\.init_args\.rewards)"
    r"(\..*)?"
)


def compare(runs: Sequence[LoggedRun], baseline: str, pass_at: Sequence[int]) -> pd.DataFrame:
    """The figures of methods with intervals, and of acc@n and pass@k the differences from a baseline.

    A row has the columns ``part`` (dataset or average), ``dataset``, ``figure``, ``problems``, ``method``, ``seeds``,
    ``value``, ``low``, ``high``, ``baseline``, ``paired_seeds``, and those of `_with_corrected`.
    A ValueError if the runs were evaluated on other problems or with other settings. All must have samples.
    """
    if other := _other(runs, lambda run: _settings(run.facts)):
        raise ValueError(
            f"Runs can be compared only on the same problems with the same settings, but {other}. Test them with the "
            "same config."
        )
    samples, first = pd.concat(map(_read, runs), ignore_index=True), runs[0].facts["datasets"]
    of_problems = by_problem(samples, "dataset")[:, 0].reshape(len(runs), -1)[0]  # The same for all runs.
    datasets = {name: of_problems == name for name in pd.unique(of_problems)}
    sizes = {name: int(rows.sum()) for name, rows in datasets.items()}
    limit = float((runs[0].facts.get("sampling") or {}).get("max_response_length") or 1 << 20)
    rows: list[dict[str, Any]] = []
    for figure, share in _figures(samples, pass_at, limit).items():
        values, noise = (array.reshape(len(runs), -1).T for array in share)  # [N, runs]
        for part, weights in parts_of(sizes).items():
            fields = {
                "part": "dataset" if part in weights else "average",
                "dataset": label(part, first[part].get("first")) if part in weights else part,
                "figure": figure,
                "problems": sum(sizes[name] for name in weights),
            }
            tables = [(values[datasets[name]], noise[datasets[name]]) for name in weights]
            of_methods = _methods(runs, tables, list(weights.values()), baseline if "@" in figure else None)
            rows += [fields | row for row in of_methods]
    frame = pd.DataFrame(rows)
    frame.loc[frame["figure"] == "tokens", ["value", "low", "high"]] *= limit
    return _with_corrected(frame)


def _other(runs: Sequence[LoggedRun], settings: Callable[[LoggedRun], Mapping[str, Any]]) -> str | None:
    """What differs between the settings of two runs; None if nothing does."""
    for run in runs[1:]:
        if differ := unequal(settings(runs[0]), settings(run)):
            return f"{runs[0].given} and {run.given} differ in {'; '.join(differ.values())}"
    return None


def _settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in two evaluations, by name."""
    settings = {"num_samples": facts["num_samples"]}
    settings |= {f"sampling.{name}": value for name, value in (facts.get("sampling") or {}).items()}
    settings |= {f"grading of {name}": value for name, value in (facts.get("grading") or {}).items()}
    for name, about in facts["datasets"].items():
        settings[f"problems of {name}"] = f"{about['problems']} problems, digest {about['digest']}"
    return settings


def _read(run: LoggedRun) -> pd.DataFrame:
    """The samples of a run, in an order that is the same for all runs of the same problems."""
    assert run.samples is not None
    samples = sample_frame(read_samples(run.samples), run.facts["num_samples"])
    for dataset, about in run.facts["datasets"].items():
        number = int((samples["dataset"] == dataset).sum()) // run.facts["num_samples"]
        if number != about["problems"]:
            raise ValueError(
                f"{run.samples} must hold all {about['problems']} problems of {dataset or 'its data'} with "
                f"{run.facts['num_samples']} samples each, but it holds {number}. Run the same `test` "
                "again, which continues it."
            )
    return samples.sort_values(["dataset", "problem", "index", "sample"])


def _figures(samples: pd.DataFrame, pass_at: Sequence[int], limit: float) -> dict[str, Share]:
    # Lengths are shares of the limit, so that they have the interval of a share.
    tokens = by_problem(samples, "num_tokens") / limit
    figures = accuracies(samples, pass_at, ()) | {"tokens": (tokens.mean(1), tokens.var(1) / tokens.shape[1])}
    return figures | {name: share for name, share in failures(samples).items() if name != "grading errors"}


def _methods(
    runs: Sequence[LoggedRun], tables: Sequence[Share], weights: Sequence[float], baseline: str | None
) -> list[dict[str, Any]]:
    """One row for each method: its figure, and its difference from the baseline if there is one.

    `tables` have the shares of each dataset ``[N_d, runs]``.
    """
    columns = {run.method: [k for k, other in enumerate(runs) if other.method == run.method] for run in runs}
    seeds = {method: [runs[k].seed for k in members] for method, members in columns.items()}

    def shares(method: str, places: Sequence[int]) -> list[Share]:
        chosen = [columns[method][place] for place in places]
        return [(values[:, chosen], noise[:, chosen]) for values, noise in tables]

    rows = []
    for method, members in seeds.items():
        result = estimate(shares(method, range(len(members))), weights)
        row = {"method": method, "seeds": len(members), "value": result.value, "low": result.low, "high": result.high}
        row |= {"tested": None, "paired_seeds": math.nan}
        if baseline in columns and method != baseline:
            ours, theirs, paired = paired_seeds(members, seeds[baseline])
            tested = difference(shares(method, ours), shares(baseline, theirs), weights, paired)
            row |= {"baseline": baseline, "tested": tested, "paired_seeds": len(ours) if paired else math.nan}
        rows.append(row)
    return rows


def _with_corrected(frame: pd.DataFrame) -> pd.DataFrame:
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


# --- learning curves --------------------------------------------------------------------------------------------------


def read_scalars(folder: Path, tag: str) -> dict[int, float]:
    """A scalar by step, of all event files of a folder; empty if they do not have it.

    A run that was resumed has logged some steps twice. The value that was logged last counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0 keeps all of them.
    if tag not in events.Tags()["scalars"]:
        return {}
    values: dict[int, float] = {}
    for point in events.Scalars(tag):  # What follows an earlier step was logged before a resume from it.
        if values and point.step <= next(reversed(values)):
            values = {step: value for step, value in values.items() if step < point.step}
        values[point.step] = float(point.value)
    return values


def curve_end(values: Mapping[int, float]) -> float:
    """The value of a curve at its last step."""
    return values[max(values)]


def curve_mean(values: Mapping[int, float]) -> float:
    """The mean of a curve over its steps, by the trapezoidal rule; it must have two steps."""
    steps = sorted(values)
    return float(np.trapezoid([values[step] for step in steps], steps) / (steps[-1] - steps[0]))


def read_curves(runs: Sequence[LoggedRun]) -> tuple[pd.DataFrame, list[str]]:
    """The curves as rows of ``method``, ``seed``, ``step`` and ``value``, and the runs that are left out.

    A run that was interrupted, or is not yet over, would cut the curves of its method's other runs short.
    """
    points = []
    for run in runs:
        for step, value in (read_scalars(run.events, CURVE) if run.events else {}).items():
            if math.isfinite(value):
                points.append((run.method, run.seed, run.given, step, value))
    frame = pd.DataFrame(points, columns=["method", "seed", "run", "step", "value"]).astype({"seed": object})
    last = frame.groupby("run")["step"].transform("max")
    short = last < last.groupby(frame["method"]).transform("max")
    return frame[~short], list(frame[short]["run"].unique())


def compare_curves(curves: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """A row for each method and step, and one for its end: the last step that all runs of all methods have.

    Ends are compared with the baseline's: paired over seeds, and corrected for the number of comparisons.
    """
    tables = {
        name: method_curves.pivot(index="step", columns="run", values="value").dropna()[method_curves["run"].unique()]
        for name, method_curves in curves.groupby("method", sort=False)
    }
    end = max(set.intersection(*(set(table.index) for table in tables.values())), default=None) if tables else None
    seed_of = curves.groupby("run")["seed"].first()
    rows: list[dict[str, Any]] = []
    for method, table in tables.items():
        fields = {"figure": CURVE, "dataset": "", "method": method, "tested": None, "paired_seeds": math.nan}
        for step, values in table.iterrows():
            band = seeds_estimate(list(values))
            row = fields | {"step": step, "seeds": len(values), "value": band.value, "low": band.low, "high": band.high}
            rows.append(row | {"part": "curve"})
            if step == end:
                ending = row | {"part": "end"}
        if end is not None:
            if method != baseline and baseline in tables:
                ours, theirs = table.loc[end], tables[baseline].loc[end]
                mine, others, paired = paired_seeds(list(seed_of[ours.index]), list(seed_of[theirs.index]))
                tested = seeds_difference(list(ours.iloc[mine]), list(theirs.iloc[others]), paired)
                ending |= {"baseline": baseline, "tested": tested}
                ending |= {"paired_seeds": len(mine) if paired and tested else math.nan}
            rows.append(ending)
    return _with_corrected(pd.DataFrame(rows)) if rows else pd.DataFrame()


def other_validation(runs: Sequence[LoggedRun]) -> str | None:
    """What differs between the validations of two runs, as far as their configs tell; None if nothing does."""
    return _other([run for run in runs if run.events and run.config], _validation)


def _validation(run: LoggedRun) -> dict[str, object]:
    """The options that decide on the problems and the sampling of a validation."""
    evaluation, data, model = (run.config.get(name) or {} for name in ("evaluation", "data", "model"))
    options = {
        f"data.{name}": value for name, value in flat(data.get("init_args") or {}) if not _TRAINING.fullmatch(name)
    }
    options["trainer.limit_val_batches"] = (run.config.get("trainer") or {}).get("limit_val_batches")
    options |= {"data": data.get("class_path"), "evaluation.num_samples": evaluation.get("num_samples")}
    # Without options of its own a validation samples as training does.
    return options | {"evaluation.sampling": evaluation.get("sampling") or model.get("sampling")}

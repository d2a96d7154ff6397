"""Learning curves from TensorBoard's event files: the mean over seeds with its band, and the comparison of ends."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grail_lightning.evaluate.compare import with_corrected
from grail_lightning.evaluate.records import flat, unequal
from grail_lightning.evaluate.runs import Run, paired_seeds
from grail_lightning.evaluate.statistics import seeds_difference, seeds_estimate

CURVE = "val/accuracy"
# Options of the data that change training but not the problems of its validations.
_TRAINING = re.compile(
    r"(train|num_train|test|num_test|prompts_per_batch|eval_prompts_per_batch|curriculum|kept|task\.init_args\.rewards)"
    r"(\..*)?"
)


def read_scalars(folder: Path, tag: str) -> dict[int, float]:
    """A scalar by step, of all event files of a folder; empty if they do not have it.

    A run that was resumed has logged some steps twice. The value that was logged last counts.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 1 keeps the newest of what is not needed; 0 keeps everything.
    unused = dict.fromkeys(("tensors", "images", "audio", "histograms", "compressedHistograms"), 1)
    events = EventAccumulator(str(folder), size_guidance={**unused, "scalars": 0}).Reload()
    if tag not in events.Tags()["scalars"]:
        return {}
    return {point.step: float(point.value) for point in events.Scalars(tag)}


def read_curves(runs: Sequence[Run]) -> tuple[pd.DataFrame, list[str]]:
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
        name: of.pivot(index="step", columns="run", values="value").dropna()[of["run"].unique()]
        for name, of in curves.groupby("method", sort=False)
    }
    end = max(set.intersection(*(set(table.index) for table in tables.values())), default=None) if tables else None
    seed_of = curves.groupby("run")["seed"].first()
    rows: list[dict[str, Any]] = []
    for method, table in tables.items():
        known = {"figure": CURVE, "dataset": "", "method": method, "tested": None, "paired_seeds": math.nan}
        for step, values in table.iterrows():
            band = seeds_estimate(list(values))
            row = known | {"step": step, "seeds": len(values), "value": band.value, "low": band.low, "high": band.high}
            rows.append(row | {"part": "curve"})
            if step == end:
                ending = row | {"part": "end"}
        if end is not None:
            if method != baseline and baseline in tables:
                ending |= {"baseline": baseline} | _difference(table.loc[end], tables[baseline].loc[end], seed_of)
            rows.append(ending)
    return with_corrected(pd.DataFrame(rows)) if rows else pd.DataFrame()


def _difference(ours: pd.Series, theirs: pd.Series, seed_of: pd.Series) -> dict[str, Any]:
    """The difference of two ends over seeds, and over how many seeds it is paired."""
    places = paired_seeds(list(seed_of[ours.index]), list(seed_of[theirs.index]))
    if not places:
        return {"tested": seeds_difference(list(ours), list(theirs), False)}
    mine, other = (list(of) for of in zip(*places, strict=True))
    tested = seeds_difference(list(ours.iloc[mine]), list(theirs.iloc[other]), True)
    return {"tested": tested, "paired_seeds": len(places) if tested else math.nan}


def other_validation(runs: Sequence[Run]) -> str | None:
    """What differs between the validations of two runs, as far as their configs tell; None if nothing does."""
    runs = [run for run in runs if run.events and run.config]
    for run in runs[1:]:
        if differ := unequal(_validation(runs[0]), _validation(run)):
            return f"{runs[0].given} and {run.given} differ in {', '.join(differ.values())}"
    return None


def _validation(run: Run) -> dict[str, object]:
    """The options that decide on the problems and the sampling of a validation."""
    evaluation, data, model = (run.config.get(name) or {} for name in ("evaluation", "data", "model"))
    options = {
        f"data.{name}": value for name, value in flat(data.get("init_args") or {}) if not _TRAINING.fullmatch(name)
    }
    options |= {"data": data.get("class_path"), "evaluation.num_samples": evaluation.get("num_samples")}
    # Without options of its own a validation samples as training does.
    return options | {"evaluation.sampling": evaluation.get("sampling") or model.get("sampling")}

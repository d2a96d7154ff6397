"""Learning curves from TensorBoard's event files: the mean over seeds with its band, and the comparison of ends."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grail_lightning.evaluate.compare import with_corrected
from grail_lightning.evaluate.runs import Run, paired_seeds
from grail_lightning.evaluate.seeds import seeds_difference, seeds_estimate

CURVE = "val/accuracy"
# Options of the data that change training but not the problems of its validations.
_TRAINING = {"train", "num_train", "prompts_per_batch", "eval_prompts_per_batch", "curriculum", "kept"}
_TRAINING |= {"test", "num_test"}


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
    common = set.intersection(*(set(table.index) for table in tables.values())) if tables else set()
    seed_of = curves.groupby("run")["seed"].first()
    rows: list[dict[str, Any]] = []
    for method, table in tables.items():
        for step, values in table.iterrows():
            band = seeds_estimate(list(values))
            row = {"part": "curve", "method": method, "step": step, "seeds": len(values), "tested": None}
            rows.append(row | {"value": band.value, "low": band.low, "high": band.high, "paired_seeds": math.nan})
        if common:
            end = table.loc[max(common)]
            rows.append(
                next(row for row in rows if (row["method"], row["step"]) == (method, end.name)) | {"part": "end"}
            )
            if method != baseline and baseline in tables:
                rows[-1] |= {"baseline": baseline} | _difference(end, tables[baseline].loc[end.name], seed_of)
    frame = pd.DataFrame(rows)
    return with_corrected(frame.assign(figure=CURVE, dataset="")) if rows else frame


def _difference(ours: pd.Series, theirs: pd.Series, seed_of: pd.Series) -> dict[str, Any]:
    """The difference of two ends over seeds, and over how many seeds it is paired."""
    places = paired_seeds(list(seed_of[ours.index]), list(seed_of[theirs.index]))
    if not places:
        return {"tested": seeds_difference(list(ours), list(theirs), False)}
    pairs = [(ours.iloc[one], theirs.iloc[two]) for one, two in places]
    tested = seeds_difference([one for one, _ in pairs], [two for _, two in pairs], True)
    return {"tested": tested, "paired_seeds": len(places) if tested else math.nan}


def other_validation(runs: Sequence[Run]) -> str | None:
    """What differs between the validations of two runs, as far as their configs tell; None if nothing does."""
    runs = [run for run in runs if run.events and run.config]
    for run in runs[1:]:
        one, two = _validation(runs[0]), _validation(run)
        names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if names:
            differ = ", ".join(f"`{name}` ({one.get(name)!r:.60}, {two.get(name)!r:.60})" for name in names)
            return f"{runs[0].given} and {run.given} differ in {differ}"
    return None


def _validation(run: Run) -> dict[str, object]:
    """The options that decide on the problems and the sampling of a validation."""
    evaluation, data, model = (run.config.get(name) or {} for name in ("evaluation", "data", "model"))
    options = data.get("init_args") or {}
    settings = {f"data.{name}": value for name, value in options.items() if name not in _TRAINING}
    if isinstance(task := options.get("task"), dict):
        rest = {name: value for name, value in (task.get("init_args") or {}).items() if name != "rewards"}
        settings["data.task"] = {**task, "init_args": rest}
    settings |= {"data": data.get("class_path"), "evaluation.num_samples": evaluation.get("num_samples")}
    # Without options of its own a validation samples as training does.
    return settings | {"evaluation.sampling": evaluation.get("sampling") or model.get("sampling")}


def picture(curves: pd.DataFrame, plain: Callable[[str], str]) -> str:
    """The curves of each method with their bands, as the address of an SVG image."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # The browser has letters that matplotlib's font lacks.
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes, lines, names = figure.add_subplot(xlabel="optimiser steps", ylabel=CURVE), [], []
        styles = ("solid", "dashed", "dotted", "dashdot")  # Neighbours differ without colour, too.
        for number, (method, of) in enumerate(curves.groupby("method", sort=False)):
            style = styles[number % len(styles)]
            (line,) = axes.plot(of["step"], of["value"], linestyle=style, marker="o", markersize=2.5)
            axes.fill_between(of["step"], of["low"], of["high"], color=line.get_color(), alpha=0.15, linewidth=0)
            lines.append(line)
            names.append(plain(str(method)))
        axes.grid(linewidth=0.4)
        # Names are untrusted: a `$` begins no formula, and a `_` hides none.
        for text, name in zip(axes.legend(lines, ["x"] * len(lines)).get_texts(), names, strict=True):
            text.set_parse_math(False)
            text.set_text(name)
        written = io.BytesIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"

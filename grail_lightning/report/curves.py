"""Learning curves from TensorBoard's event files, with bands over seeds, and the comparison of their ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grail_lightning.evaluation.comparison import Difference, Estimate, over_seeds, seeds_estimate
from grail_lightning.evaluation.statistics import holm
from grail_lightning.report.methods import Method, paired_places
from grail_lightning.report.runs import Run

CURVE = "val/accuracy"
# What changes training but not the problems of its validations.
_TRAINING = {
    "train",
    "num_train",
    "prompts_per_batch",
    "eval_prompts_per_batch",
    "curriculum",
    "kept",
    "test",
    "num_test",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one method, at the steps that all of its runs have.

    Attributes:
        method: The method's name.
        seeds: The seeds of its runs.
        steps: Optimiser steps.
        values: For each step the value of each run.
        shorter: Runs that ended before the longest one of the method, and are left out.
    """

    method: str
    seeds: tuple[int | None, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    shorter: tuple[str, ...] = ()

    def at(self, step: int) -> tuple[float, ...]:
        """The values of all runs at a step."""
        return self.values[self.steps.index(step)]

    @property
    def band(self) -> list[Estimate]:
        """The mean over seeds at each step, with Student's interval."""
        return [seeds_estimate(values) for values in self.values]


@dataclass(frozen=True, kw_only=True)
class End:
    """Where a curve ends.

    Attributes:
        method: The method's name.
        seeds: The number of its runs.
        step: The last step that all runs of all methods have.
        estimate: The mean over seeds.
        difference: The difference from the baseline; None for the baseline, and without several seeds.
        corrected: The p-value, corrected by Holm's method.
        detectable: The smallest difference that could have been shown.
        pairs: The number of seeds over which the difference is paired; None if seeds are not paired.
    """

    method: str
    seeds: int
    step: int
    estimate: Estimate
    difference: Difference | None = None
    corrected: float = math.nan
    detectable: float = math.nan
    pairs: int | None = None


def read_curves(methods: Sequence[Method]) -> list[Curve]:
    """The curves of the methods whose runs have event files with `CURVE`.

    A run that was interrupted, or is not yet over, would cut the curves of all others short. It is left out.
    """
    found, out = [], unfinished(methods)
    for method in methods:
        runs = [run for run in method.runs if run.events and run not in out]
        points = [(run, scalars) for run in runs if run.events and (scalars := _scalars(run.events, CURVE))]
        last = max((max(scalars) for _, scalars in points), default=0)
        whole = [(run, scalars) for run, scalars in points if max(scalars) == last]
        if whole:
            order = tuple(sorted(set.intersection(*(set(scalars) for _, scalars in whole))))
            found.append(
                Curve(
                    method=method.name,
                    seeds=tuple(run.seed for run, _ in whole),
                    steps=order,
                    values=tuple(tuple(scalars[step] for _, scalars in whole) for step in order),
                    shorter=tuple(run.given for run, scalars in points if max(scalars) < last),
                )
            )
    return found


def unfinished(methods: Sequence[Method]) -> list[Run]:
    """The runs that a sweep has not finished, if others are finished."""
    runs = [run for method in methods for run in method.runs]
    return [run for run in runs if not run.is_over] if any(run.is_over for run in runs) else []


def compare_ends(curves: Sequence[Curve], baseline: str) -> list[End]:
    """The last values that all curves have, with differences from the baseline: paired over seeds, corrected.

    Args:
        curves: The curves.
        baseline: The name of the method that the others are compared with.
    """
    common = set.intersection(*(set(curve.steps) for curve in curves)) if curves else set()
    if not common:
        return []
    step = max(common)
    base = next((curve for curve in curves if curve.method == baseline), None)
    ends = []
    for curve in curves:
        values = curve.at(step)
        end = End(method=curve.method, seeds=len(values), step=step, estimate=seeds_estimate(values))
        if base is not None and curve is not base:
            theirs, places = base.at(step), paired_places(curve.seeds, base.seeds)
            if places:
                values, theirs = (
                    tuple(of[place] for place in kept) for of, kept in zip((values, theirs), places, strict=True)
                )
            found = over_seeds(values, theirs, places is not None)
            end = replace(end, difference=found, pairs=len(places[0]) if found and places else None)
        ends.append(end)
    corrected = holm([math.nan if end.difference is None else end.difference.p_value for end in ends])
    tests = sum(end.difference is not None for end in ends)
    tested = []
    for end, p_value in zip(ends, corrected, strict=True):
        if (found := end.difference) is not None:
            # Seeds that differ all alike tell nothing of what could be shown.
            least = math.nan if math.isnan(found.low) else found.detectable(tests)
            end = replace(end, corrected=p_value, detectable=least)
        tested.append(end)
    return tested


def other_validation(methods: Sequence[Method]) -> str | None:
    """What differs between the validations of two methods, as far as their configs tell; None if nothing does."""
    runs = [run for method in methods for run in method.runs if run.events and run.config]
    for run in runs[1:]:
        one, two = _validation(runs[0]), _validation(run)
        names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
        if names:
            said = ", ".join(f"`{name}` ({one.get(name)!r:.60}, {two.get(name)!r:.60})" for name in names)
            return f"{runs[0].given} and {run.given} differ in {said}"
    return None


def _validation(run: Run) -> dict[str, Any]:
    """The options that decide on the problems and the sampling of a validation."""
    evaluation = _mapping(run.config.get("evaluation"))
    data = _mapping(run.config.get("data"))
    options = _mapping(data.get("init_args"))
    # Without options of its own a validation samples as training does.
    sampling = evaluation.get("sampling") or _mapping(run.config.get("model")).get("sampling")
    same = {f"data.{name}": value for name, value in options.items() if name not in _TRAINING}
    if isinstance(task := options.get("task"), dict):
        rest = {name: value for name, value in _mapping(task.get("init_args")).items() if name != "rewards"}
        same["data.task"] = {**task, "init_args": rest}
    return same | {
        "data": data.get("class_path"),
        "evaluation.num_samples": evaluation.get("num_samples"),
        "evaluation.sampling": sampling,
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _scalars(folder: Path, tag: str) -> dict[int, float]:
    """The finite values of a scalar by step, of all event files of a folder; the last one logged counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 1 keeps the newest of what is not needed; 0 keeps everything.
    unused = dict.fromkeys(("tensors", "images", "audio", "histograms", "compressedHistograms"), 1)
    events = EventAccumulator(str(folder), size_guidance={**unused, "scalars": 0}).Reload()
    if tag not in events.Tags()["scalars"]:
        return {}
    points = {point.step: float(point.value) for point in events.Scalars(tag)}
    return {step: value for step, value in points.items() if math.isfinite(value)}

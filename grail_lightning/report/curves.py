"""Learning curves from TensorBoard's event files, with bands over seeds, and the comparison of their ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grail_lightning.evaluation.comparison import Estimate, over_seeds, seeds_estimate
from grail_lightning.report.events import read_scalars
from grail_lightning.report.figures import Compared, with_corrected
from grail_lightning.report.methods import Method, paired_places
from grail_lightning.report.runs import Run, mapping

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
class End(Compared):
    """Where a curve ends: the mean over seeds.

    Attributes:
        step: The last step that all runs of all methods have.
    """

    step: int


def read_curves(methods: Sequence[Method]) -> list[Curve]:
    """The curves of the methods whose runs have event files with `CURVE`.

    A run that was interrupted, or is not yet over, would cut the curves of all others short. It is left out.
    """
    found, out = [], unfinished(methods)
    for method in methods:
        points = [
            (run, scalars)
            for run in method.runs
            if run.events and run not in out and (scalars := _finite(read_scalars(run.events, CURVE)))
        ]
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
    return with_corrected(ends)


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


def _validation(run: Run) -> dict[str, object]:
    """The options that decide on the problems and the sampling of a validation."""
    evaluation = mapping(run.config.get("evaluation"))
    data = mapping(run.config.get("data"))
    options = mapping(data.get("init_args"))
    # Without options of its own a validation samples as training does.
    sampling = evaluation.get("sampling") or mapping(run.config.get("model")).get("sampling")
    same = {f"data.{name}": value for name, value in options.items() if name not in _TRAINING}
    if isinstance(task := options.get("task"), dict):
        rest = {name: value for name, value in mapping(task.get("init_args")).items() if name != "rewards"}
        same["data.task"] = {**task, "init_args": rest}
    return same | {
        "data": data.get("class_path"),
        "evaluation.num_samples": evaluation.get("num_samples"),
        "evaluation.sampling": sampling,
    }


def _finite(scalars: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in scalars.items() if math.isfinite(value)}

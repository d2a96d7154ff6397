"""Whether a method trains better than uniform credit and than a lower baseline, from the curves of all three by seed.

Differences are taken within each seed. They are independent between seeds, whatever the two runs of a seed have in
common: so Student's paired interval and test hold where one of the runs is of another machine, too. What the runs of a
seed share, problems and random numbers of sampling, narrows the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grail_lightning.app.results.differences import curve_end, curve_mean
from grail_lightning.app.results.statistics import Difference, holm, seeds_difference, seeds_estimate

BASELINE = "r - mean/2"
Curves = Mapping[int, Mapping[int, float]]
"""The held-out accuracy of an arm, by seed and step."""
_OUTCOMES: dict[str, Callable[[Mapping[int, float]], float]] = {"over_training": curve_mean, "end": curve_end}
_SUFFIX = {"over_training": "", "end": "_end"}  # The first one is the primary outcome.
_REFERENCES = ("uniform", "baseline")


SIDES = ("method", "uniform", "baseline")


class Arms(NamedTuple):
    """The finished runs of one world: those of the method, of uniform credit and of the lower baseline."""

    method: Curves
    uniform: Curves
    baseline: Curves


def training_figures(worlds: Mapping[str, Arms]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What the training of a method shows in each world, and reasons for figures that are missing, by dotted paths.

    Differences are in percentage points of accuracy, with 95 % intervals over seeds. The comparisons of an outcome, the
    mean over training or its end, are one family for Holm's correction: all worlds with both references. `detectable`
    is the true difference that a repetition would find with a probability of 80 %, after the correction.
    """
    figures: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for world, arms in worlds.items():
        shared = sorted(arms.method.keys() & arms.uniform.keys() & arms.baseline.keys())
        ends = {max(curves[seed]) for curves in arms for seed in shared}
        if len(ends) > 1:
            raise ValueError(f"The runs of a world must have one length, but those of {world} end at {sorted(ends)}.")
        bands = {name: _band([curves[seed] for seed in shared]) for name, curves in zip(SIDES, arms, strict=True)}
        figures[world] = {"seeds": shared, "steps": ends.pop(), "curves": bands}
        figures[world]["beside_baseline"] = {"baseline": BASELINE}
    for outcome, of in _OUTCOMES.items():
        tested = {
            (world, reference): _difference(arms.method, getattr(arms, reference), figures[world]["seeds"], of)
            for world, arms in worlds.items()
            for reference in _REFERENCES
        }
        corrected = holm([math.nan if one is None else one.p_value for one in tested.values()])
        family = sum(one is not None for one in tested.values())
        for ((world, reference), one), p_holm in zip(tested.items(), corrected, strict=True):
            place = figures[world] if reference == "uniform" else figures[world]["beside_baseline"]
            cells, why = _cells(one, p_holm, family)
            place[outcome] = cells.pop("interval")
            place |= {f"{name}{_SUFFIX[outcome]}": value for name, value in cells.items()}
            if why:
                path = outcome if reference == "uniform" else f"beside_baseline.{outcome}"
                reasons[f"{world}.{path}"] = why
    return figures, reasons


def _difference(ours: Curves, theirs: Curves, seeds: Iterable[int], of: Callable[..., float]) -> Difference | None:
    """The paired difference of an outcome; None for one seed, or none."""
    pairs = [(of(ours[seed]), of(theirs[seed])) for seed in seeds]
    return seeds_difference([a for a, _ in pairs], [b for _, b in pairs], paired=True) if len(pairs) > 1 else None


def _cells(tested: Difference | None, p_holm: float, family: int) -> tuple[dict[str, Any], str]:
    """The figures of a comparison, in points, and why its interval is missing."""
    if tested is None:
        return dict.fromkeys(("interval", "p", "p_holm", "detectable")), "An interval needs at least two seeds."
    cells: dict[str, Any] = {"interval": None, "p": tested.p_value, "p_holm": p_holm, "detectable": None}
    if math.isnan(tested.low):
        size = f"{100 * tested.value:.2f}"
        return cells, f"The difference is {size} points with every seed, which tells nothing of its spread."
    points = [tested.value, tested.low, tested.high]
    return cells | {"interval": _in_points(points), "detectable": _in_points([tested.detectable(family)])[0]}, ""


def _in_points(shares: Sequence[float]) -> list[float]:
    return [round(100 * share, 3) for share in shares]


def _band(curves: Sequence[Mapping[int, float]]) -> dict[str, list[Any]]:
    """The mean accuracy and its 95 % interval at each step that all runs have; limits are None without an interval."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    bands = [seeds_estimate([curve[step] for curve in curves]) for step in steps]
    limits = {name: [getattr(band, name) for band in bands] for name in ("value", "low", "high")}
    rounded = {
        name: [None if math.isnan(value) else round(value, 5) for value in values] for name, values in limits.items()
    }
    return {"steps": steps, "mean": rounded.pop("value"), **rounded}

"""What a reader of the figures has to know."""

from __future__ import annotations

from collections.abc import Sequence

from grail_lightning.report.curves import CURVE, Curve, End, unfinished
from grail_lightning.report.figures import Compared
from grail_lightning.report.methods import Method
from grail_lightning.report.results import Evaluated, Line
from grail_lightning.report.runs import mapping


def of_runs(methods: Sequence[Method]) -> list[str]:
    """The values of the grid at which methods were run, where their names do not show them."""
    points = {method.name: method.runs[0].point for method in methods}
    shown = [f"{name}: {point}" for name, point in points.items() if point and not name.endswith(point)]
    return [f"Values of the sweep's grid: {'; '.join(shown)}."] if shown else []


def of_curves(methods: Sequence[Method], curves: Sequence[Curve], ends: Sequence[End]) -> list[str]:
    """Which runs the curves leave out, and where they are compared."""
    notes = []
    if curves and (out := [run.given for run in unfinished(methods)]):
        notes.append(f"Left out of the curves, since the sweep has not finished them: {'; '.join(out)}.")
    if shorter := [run for curve in curves for run in curve.shorter]:
        notes.append(
            f"Left out of the curves, since they ended before other runs of their method: {'; '.join(shorter)}."
        )
    longer = [curve.method for curve in curves if ends and curve.steps[-1] > ends[0].step]
    if longer:
        notes.append(
            f"{CURVE} is compared at step {ends[0].step}, the last one that all methods have; there are later ones of "
            f"{'; '.join(longer)}."
        )
    if single := [end.method for end in ends if end.seeds == 1]:
        notes.append(f"One seed has no interval and no difference over seeds: {'; '.join(single)}.")
    return notes + _same_training(methods)


def of_figures(
    methods: Sequence[Method], evaluated: Evaluated | None, lines: Sequence[Line], ends: Sequence[End]
) -> list[str]:
    """What intervals and comparisons mean, over which seeds they are, and what to look at again."""
    notes = ["[low, high] is a 95 % interval."]
    tested = [line for line in (*lines, *ends) if line.difference is not None]
    if tested:
        families = ": the datasets of a figure together, each average by itself" if evaluated else ""
        problems = "problems, and over the seeds that both methods have" if evaluated else "the seeds that both have"
        notes.append(
            f"Differences are paired over {problems}. p is two-sided; p (Holm) is corrected for the number of "
            f"comparisons{families}."
        )
        notes += _pairs(methods, tested)
        notes.append(
            "detectable: a true difference of this size would be found with a probability of 80 %, after the "
            "correction. Smaller ones cannot be told from none by such runs."
        )
    if ends and len(ends) > 1:
        notes.append(f"{CURVE} is that of the problems of the validation alone: its intervals are about other seeds.")
    if evaluated is None:
        return notes
    if len(evaluated.methods) > 1 and any(line.difference and line.difference.seeds is None for line in tested):
        notes.append("A method with one seed is compared as that one run: other seeds may differ by more.")
    runs = [f"{m.name} ({len(m.evaluated)} of {len(m.runs)})" for m in methods if len(m.evaluated) < len(m.runs)]
    if runs:
        notes.append(f"Not all runs have samples: {'; '.join(runs)}.")
    return notes + _same_weights(evaluated)


def _pairs(methods: Sequence[Method], tested: Sequence[Compared]) -> list[str]:
    """Over how many seeds the differences are, where the methods have others besides."""
    numbers = {method.name: len(method.runs) for method in methods}
    most = max(numbers.values())
    found: dict[int | None, dict[str, None]] = {}
    for line in tested:
        if most > 1 and line.pairs != most:
            found.setdefault(line.pairs, {})[line.method] = None
    notes = []
    for pairs, names in found.items():
        said = "; ".join(names)
        if pairs is None:
            notes.append(f"Not paired over seeds, of which too few are the same as the baseline's: {said}.")
        else:
            seeds = "seed" if pairs == 1 else "seeds"
            notes.append(f"Differences over the {pairs} {seeds} that the method and the baseline both have: {said}.")
    return notes


def _same_training(methods: Sequence[Method]) -> list[str]:
    """A note about runs that have the curve of one and the same training."""
    first: dict[str, str] = {}
    trained = [(run, str(run.events.resolve())) for method in methods for run in method.runs if run.events]
    for run, place in trained:
        if first.setdefault(place, run.given) != run.given:
            return [f"{first[place]} and {run.given} are of one training, so that their {CURVE} in training is one."]
    return []


def _same_weights(evaluated: Evaluated) -> list[str]:
    """A note about runs that evaluated the same policy, such as the one before training."""
    first: dict[str, str] = {}
    for method in evaluated.methods:
        for run in method.evaluated:
            digest = mapping(run.facts.get("model")).get("digest")
            if isinstance(digest, str) and first.setdefault(digest, run.given) != run.given:
                return [
                    f"{first[digest]} and {run.given} evaluated the same weights. If they should not have, test again "
                    "with --ckpt_path or with the --model.policy of each run."
                ]
    return []

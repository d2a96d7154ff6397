"""Draw docs/pictures/study.png from the runs of configs/study.yaml, and print the figures beside it.

python scripts/plot_study.py runs/study docs/pictures/study.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BASELINE = "GRPO"
Curves = dict[str, dict[int, dict[int, float]]]


def curves(folder: Path) -> Curves:
    """Held-out accuracy by method, seed and step, of the seeds with which every method is finished."""
    found: Curves = {}
    for file in sorted(folder.glob("*/sweep.json")):
        record = json.loads(file.read_text())
        if record["state"] == "finished":
            events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0}).Reload()
            values = {event.step: event.value for event in events.Scalars("val/accuracy")}
            found.setdefault(record["method"], {})[record["seed"]] = values
    common = set.intersection(*(set(seeds) for seeds in found.values()))
    return {method: {seed: seeds[seed] for seed in sorted(common)} for method, seeds in found.items()}


def interval(values: np.ndarray) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval by Student's t, over seeds."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def row(method: str, whole: Curves) -> str:
    """A row of the table: final accuracy, its difference from the baseline's by seed, and the same of the area."""
    cells = []
    for of in (lambda values: values[max(values)], area):
        ours, base = (np.array([of(values) for values in whole[name].values()]) for name in (method, BASELINE))
        cells.append("{:.3f} ±{:.3f}".format(*interval(ours)))
        if method == BASELINE:
            cells.append("")
        else:
            (mean, half), p = interval(ours - base), stats.ttest_rel(ours, base).pvalue
            cells.append(f"{100 * mean:+.1f} ±{100 * half:.1f} (p = {p:.3f})")
    return f"| {method} | {' | '.join(cells)} |"


def area(values: dict[int, float]) -> float:
    """The mean of the curve over the steps, by the trapezoidal rule."""
    steps = sorted(values)
    return float(np.trapezoid([values[step] for step in steps], steps) / (steps[-1] - steps[0]))


def main(folder: Path, out: Path) -> None:
    """A line is a method's mean over seeds, its band the 95 % interval of that mean."""
    whole = curves(folder)
    order = sorted(whole, key=lambda method: (method != BASELINE, method))
    seeds = sorted(whole[BASELINE])
    print(f"{len(order)} methods, seeds {', '.join(map(str, seeds))}")
    print(f"| method | at the end | minus {BASELINE}, points | mean over training | minus {BASELINE}, points |")
    print("|---|--:|--:|--:|--:|")
    print("\n".join(row(method, whole) for method in order))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for number, method in enumerate(order):
        steps = sorted(next(iter(whole[method].values())))
        values = np.array([[curve[step] for step in steps] for curve in whole[method].values()])
        base = np.array([[curve[step] for step in steps] for curve in whole[BASELINE].values()])
        for axis, shown in ((left, values), (right, 100 * (values - base))):
            mean, half = np.array([interval(column) for column in shown.T]).T
            axis.plot(steps, mean, color=f"C{number}", label=method, marker="o", markersize=3)
            axis.fill_between(steps, mean - half, mean + half, color=f"C{number}", alpha=0.12, linewidth=0)
    left.set(title=f"held-out accuracy, mean of {len(seeds)} seeds", xlabel="optimiser steps")
    right.set(title=f"minus {BASELINE}'s of the same seed, points", xlabel="optimiser steps")
    left.legend(loc="lower right", frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("out", type=Path, help="the picture")
    options = parser.parse_args()
    main(options.folder, options.out)

"""Draw the differences from Dr. GRPO that the tables of a page report, or the curves of a sweep's runs.

    python scripts/plot_study.py docs/research/training_studies.md docs/pictures/study_credit.png
    python scripts/plot_study.py docs/research/one_step.md docs/pictures/study_limit.png --column "share, Adam"
    python scripts/plot_study.py runs/study docs/pictures/study_curves.png --methods 'Dr. GRPO' GRAIL OAR-G AnswerOnly

From a page: a row is a method, a column a table. The figures are read from the page, so that they stand in one place.
Of a table with several columns of the name, as "minus Dr. GRPO, points", the last one is drawn: the mean over training.
`scripts/study_tables.py` makes the tables of training from runs; those of one step are in docs/research alone.

From the folder of a sweep: held-out accuracy of at most four methods, a column a task.
"""

import argparse
import re
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from study_tables import interval, read

COLUMN = "minus Dr. GRPO, points"
# Pages write a true minus sign.
_INTERVAL = re.compile(r"([+\u2212-]?[\d.]+) ±([\d.]+)")


def differences(page: str, column: str = COLUMN) -> dict[str, dict[str, tuple[float, float]]]:
    """The mean and the half-width of its interval by the heading of a table and the method."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    heading, place = "", None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            place = None
        elif column in cells:
            place = len(cells) - 1 - cells[::-1].index(column)
        elif place is not None and (interval := _INTERVAL.fullmatch(cells[place])):
            mean, half = (float(number.replace("\u2212", "-")) for number in interval.groups())
            method = re.sub(r" \(.*\)", "", cells[0].replace("`", ""))
            found.setdefault(heading, {})[method] = (mean, half)
    return found


def draw(tables: dict[str, dict[str, tuple[float, float]]], out: Path, unit: str) -> None:
    """A point is a mean over seeds, a line its 95 % interval; both are grey where the interval includes 0.

    A mean of more than three times the 90 % quantile of all sizes is written at the border.
    """
    means = {name: values[0] for table in reversed(tables.values()) for name, values in table.items()}
    most = np.quantile(np.abs([mean for table in tables.values() for mean, _ in table.values()]), 0.9)
    methods = sorted(means, key=lambda name: -means[name])  # By the first table that has the method.
    size = (2.8 + 1.8 * len(tables), 0.42 * len(methods) + 0.8)
    figure, axes = plt.subplots(
        1, len(tables), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axis, (heading, table) in zip(axes[0], tables.items(), strict=True):
        axis.axvline(0, color="black", linewidth=1)
        for row, (mean, half) in ((methods.index(name), values) for name, values in table.items()):
            colour = "#777777" if abs(mean) <= half else "#0072B2" if mean > 0 else "#D55E00"
            if abs(mean) > 3 * most:  # It would squeeze all others together: its number stands at the border.
                axis.text(0.02, row, f"◂ {mean:.1f}", color=colour, va="center", transform=axis.get_yaxis_transform())
                continue
            axis.errorbar(mean, row, xerr=half, color=colour, marker="o", markersize=6, linewidth=2.5)
        axis.set_title(heading.removeprefix("In one step: ") if len(tables) > 1 else "", fontsize=12)
        axis.set(xlabel=unit)
        axis.set_yticks(range(len(methods)), [fill(name, 30) for name in methods], fontsize=11, linespacing=0.9)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    figure.savefig(out, dpi=120)


def draw_curves(folder: Path, methods: list[str], out: Path) -> None:
    """A line is a mean over seeds, a bar its 95 % interval; the bars of a step stand side by side."""
    tasks = read(folder)
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(5.5 * len(tasks), 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (task, runs) in zip(axes[0], tasks.items(), strict=True):
        for place, name in enumerate(methods):
            curves = runs[name].curves.values()
            steps = np.array(sorted(next(iter(curves))))
            means, halves = np.array([interval(np.array([curve[step] for curve in curves])) for step in steps]).T
            shifted = steps + 0.01 * np.ptp(steps) * (place - (len(methods) - 1) / 2)
            axis.errorbar(shifted, means, yerr=halves, label=name, linewidth=2, capsize=2)
        axis.set_title(task if len(tasks) > 1 else "", fontsize=12)
        axis.set_xlabel("optimiser steps", fontsize=11)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out accuracy", fontsize=11)
    axes[0, 0].legend(fontsize=11, frameon=False, loc="lower right")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the page with the tables, or the folder of the runs")
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--methods", nargs="+", default=[], help="of the runs, at most four")
    parser.add_argument("--column", default=COLUMN, help="of the tables of the page")
    options = parser.parse_args()
    if not options.source.is_dir():
        tables = differences(options.source.read_text(encoding="utf-8"), options.column)
        draw(tables, options.out, "points" if options.column == COLUMN else options.column)
    elif 1 <= len(options.methods) <= 4:
        draw_curves(options.source, options.methods, options.out)
    else:
        parser.error(
            f"`--methods` takes one to four names, since more curves hide each other, got {len(options.methods)}"
        )

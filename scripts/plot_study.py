"""Draw the differences from GRPO that the tables of a page report: a row is a method, a column a table.

    python scripts/plot_study.py docs/study_credit.md docs/pictures/study_credit.png

The figures are read from the page, so that they stand in one place. The last column "minus GRPO, points" of a table is
drawn, which is that of the mean over training. `scripts/study_tables.py` makes the tables from runs.
"""

import argparse
import re
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLUMN = "minus GRPO, points"
# Pages write a true minus sign.
_INTERVAL = re.compile(r"([+\u2212-][\d.]+) ±([\d.]+)")


def differences(page: str) -> dict[str, dict[str, tuple[float, float]]]:
    """The mean and the half-width of its interval, in points, by the heading of a table and the method."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    heading, place = "", None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            place = None
        elif COLUMN in cells:
            place = len(cells) - 1 - cells[::-1].index(COLUMN)
        elif place is not None and (interval := _INTERVAL.fullmatch(cells[place])):
            mean, half = (float(number.replace("\u2212", "-")) for number in interval.groups())
            method = re.sub(r" \(.*\)", "", cells[0].replace("`", ""))
            found.setdefault(heading, {})[method] = (mean, half)
    return found


def draw(tables: dict[str, dict[str, tuple[float, float]]], out: Path) -> None:
    """A point is a mean over seeds, a line its 95 % interval; both are grey where the interval includes 0."""
    means = {name: values[0] for table in reversed(tables.values()) for name, values in table.items()}
    methods = sorted(means, key=lambda name: -means[name])  # By the first table that has the method.
    size = (2.8 + 1.8 * len(tables), 0.42 * len(methods) + 0.8)
    figure, axes = plt.subplots(
        1, len(tables), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axis, (heading, table) in zip(axes[0], tables.items(), strict=True):
        axis.axvline(0, color="black", linewidth=1)
        for row, (mean, half) in ((methods.index(name), values) for name, values in table.items()):
            colour = "#777777" if abs(mean) <= half else "#0072B2" if mean > 0 else "#D55E00"
            axis.errorbar(mean, row, xerr=half, color=colour, marker="o", markersize=6, linewidth=2.5)
        axis.set_title(heading if len(tables) > 1 else "", fontsize=12)
        axis.set(xlabel="points")
        axis.set_yticks(range(len(methods)), [fill(name, 30) for name in methods], fontsize=11, linespacing=0.9)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0, 0].invert_yaxis()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="with the tables")
    parser.add_argument("out", type=Path, help="the picture")
    options = parser.parse_args()
    draw(differences(options.page.read_text(encoding="utf-8")), options.out)

"""Print the tables of a sweep, task by task: a curve at the end and over training, and differences from Dr. GRPO.

    python scripts/study_tables.py runs/study
    python scripts/study_tables.py docs/results/study_baseline.csv --curve val/accuracy

The argument is the folder of a sweep's runs, or the table of a study (`results` in its file). Differences from the
baseline are taken within each seed, over the seeds that both methods have finished.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from grail_lightning.app.results.differences import CURVE, curve_end, curve_mean, read_scalars
from grail_lightning.app.results.statistics import holm

BASELINE = "Dr. GRPO"


class Method(NamedTuple):
    """The finished runs of a method on a task.

    Attributes:
        point: Its values of the grid, such as the learning rate; empty without a grid.
        curves: Held-out accuracy by seed and step.
    """

    point: str
    curves: dict[int, dict[int, float]]


def read_results(file: Path) -> list[dict[str, str]]:
    """The rows of a table of finished runs; everything is text, and `curve` reads a curve from it."""
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def curve(row: Mapping[str, str], tag: str) -> dict[int, float]:
    """A curve of such a row by step; empty if the run had none."""
    return {int(step): value for step, value in json.loads(row.get(tag) or "{}").items()}


def finished(given: Path, tag: str) -> Iterator[tuple[dict[str, Any], dict[int, float]]]:
    """What each finished run is, and its curve, from the folder of the runs or from a table."""
    if given.is_file():
        for row in read_results(given):
            if row["choosing"] == "false":
                yield {**row, "seed": int(row["seed"]), "point": json.loads(row["point"])}, curve(row, tag)
        return
    for file in sorted(given.glob("*/sweep.json")):
        record = json.loads(file.read_text())
        if record["state"] == "finished":
            yield record, read_scalars(file.parent, tag)


def read(*given: Path, tag: str = CURVE) -> dict[str, dict[str, Method]]:
    """The methods of each task, the baseline first, the others in the order of their names."""
    found: dict[str, dict[str, Method]] = {}
    for record, values in (run for one in given for run in finished(one, tag)):
        point = ", ".join(f"{value:g}" for value in (record.get("point") or {}).values())
        methods = found.setdefault(record["task"], {})
        methods.setdefault(record["method"], Method(point, {})).curves[record["seed"]] = values
    return {
        task: {name: methods[name] for name in sorted(methods, key=lambda name: (name != BASELINE, name))}
        for task, methods in found.items()
        if BASELINE in methods
    }


def interval(values: np.ndarray) -> tuple[float, float]:
    """The mean and the half-width of its 95 % interval by Student's t, over seeds."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def table(methods: dict[str, Method]) -> list[str]:
    """Final accuracy and the mean over training, with differences from the baseline and p-values (Holm's method)."""
    columns, base = [], methods[BASELINE].curves
    for of in (curve_end, curve_mean):
        column, pairs = {}, {}
        for name, method in methods.items():
            column[name] = "{:.3f} ±{:.3f}".format(*interval(np.array([of(c) for c in method.curves.values()])))
            common = sorted(base.keys() & method.curves.keys())
            if name != BASELINE and len(common) > 1:
                pairs[name] = np.array([[of(method.curves[seed]), of(base[seed])] for seed in common])
        corrected = holm([float(stats.ttest_rel(*pair.T).pvalue) for pair in pairs.values()])
        for (name, pair), p in zip(pairs.items(), corrected, strict=True):
            mean, half = interval(pair[:, 0] - pair[:, 1])
            shown = f"{p:.3f}" if p >= 0.001 else "< 0.001"
            column[name] += f" | {100 * mean:+.1f} ±{100 * half:.1f} | {shown}"
        columns.append({name: text if "|" in text else f"{text} | | " for name, text in column.items()})
    head = f"minus {BASELINE}, points | p (Holm)"
    lines = [f"| method | rate | seeds | at the end | {head} | mean over training | {head} |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, method in methods.items():
        cells = [name, method.point, str(len(method.curves)), *(column[name] for column in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or tables of studies")
    parser.add_argument("--curve", default=CURVE, help="as TensorBoard calls it")
    asked = parser.parse_args()
    for task, methods in read(*asked.runs, tag=asked.curve).items():
        print(f"\n{task}\n\n" + "\n".join(table(methods)))

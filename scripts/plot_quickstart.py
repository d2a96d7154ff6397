"""Draw docs/quickstart.png from runs of the quickstart, in folders such as runs/outcome/GRAIL_0.

python scripts/plot_quickstart.py runs/outcome docs/quickstart.png
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NAMES = {"GRAIL": "GRAIL", "Uniform": "Dr. GRPO (Uniform)"}
PANELS = {
    "val/accuracy": "held-out accuracy (512 problems)",
    "train/reward": "reward of a batch of 128 rollouts",
    "credit/ess_ratio": "effective sample size of the credit",
}


def curves(folder: Path) -> dict[str, dict[str, list[list[tuple[int, float]]]]]:
    """Scalars by tag and credit method, one curve a seed."""
    found: dict[str, dict[str, list[list[tuple[int, float]]]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(folder.glob("*_*")):
        events = EventAccumulator(str(run)).Reload()
        for tag in PANELS:
            found[tag][run.name.rpartition("_")[0]].append([(e.step, e.value) for e in events.Scalars(tag)])
    return found


def main(folder: Path, out: Path) -> None:
    """One panel a tag; a line is the mean over seeds, the band their range."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.2), layout="constrained")
    for axis, (tag, methods) in zip(axes, curves(folder).items(), strict=True):
        for color, (method, seeds) in zip(("C0", "C1"), methods.items(), strict=False):
            steps = [step for step, _ in seeds[0]]
            values = np.array([[value for _, value in curve] for curve in seeds])
            axis.plot(steps, values.mean(0), color=color, label=NAMES.get(method, method))
            axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
        axis.set(title=PANELS[tag], xlabel="optimiser steps")
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("out", type=Path, help="the picture")
    options = parser.parse_args()
    main(options.folder, options.out)

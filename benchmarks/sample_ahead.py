"""Seconds of a batch with `execution.sample_ahead` and without it, in turn, with the engine of your choice.

    python benchmarks/sample_ahead.py --rounds 3 --batches 8 --config=configs/quickstart.yaml \
        --model.engine=VLLMServer --model.engine.urls='[http://127.0.0.1:8000]'

The engine must sample elsewhere: start its servers before. Options that the script does not know are those of
`grail-lightning fit`. Each round makes two short runs without validation; the first two batches of each are left out,
since the first is never sampled ahead. `tests.elsewhere.Elsewhere` is an engine for a first try: a thread of this
process, which competes with training for the interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning.pytorch import Callback

from grail_lightning.callbacks.hooks import output_of
from grail_lightning.cli.app import GrailCLI, run

SIDES = {"without": "false", "with": "true"}
PHASES = ("time/sample", "time/sample_ahead", "time/grade", "time/credit", "time/update", "sampling/staleness")


class Built(GrailCLI):
    """The objects of a command line, without its run."""

    def _run_subcommand(self, subcommand: str) -> None:
        return


class Clock(Callback):
    """Seconds from the end of one batch to that of the next, and the phases of each batch."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.phases: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.ends.append(time.perf_counter())
        self.phases.append(output_of(outputs).metrics)


def measure(side: str, batches: int, options: list[str]) -> Clock:
    """One short run."""
    ahead = [f"--model.execution.sample_ahead={SIDES[side]}", "--model.execution.sampler_cap=2"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.logger=false", "--trainer.limit_val_batches=0"]
    short = ["--trainer.max_steps=-1", "--trainer.max_epochs=1", f"--trainer.limit_train_batches={batches}"]
    made = run(Built, ["fit", *options, *ahead, *quiet, *short])
    clock = Clock()
    made.trainer.callbacks.append(clock)
    made.trainer.fit(made.model, datamodule=made.datamodule)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8)
    own, options = parser.parse_known_args()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    phases: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(own.rounds):
            for side in sorted(SIDES, reverse=bool(number % 2)):
                clock = measure(side, own.batches, options)
                seconds[side] += [b - a for a, b in zip(clock.ends[1:], clock.ends[2:], strict=False)]
                phases[side] += clock.phases[2:]
        os.chdir(here)
    print(f"\n{own.rounds} rounds of {own.batches} batches, in turn; medians, seconds")
    print("| |" + "".join(f" {side} |" for side in SIDES) + "\n|---|" + "--:|" * len(SIDES))
    print("| a batch |" + "".join(f" {statistics.median(seconds[side]):.3f} |" for side in SIDES))
    for name in PHASES:
        found = [[figures[name] for figures in phases[side] if name in figures] for side in SIDES]
        print(f"| `{name}` |" + "".join(f" {statistics.median(part):.3f} |" if part else " |" for part in found))
    ratios = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(f"with / without: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()

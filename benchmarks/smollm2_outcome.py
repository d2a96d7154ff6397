"""The outcome of configs/smollm2.yaml: held-out accuracy of SmolLM2-135M before and after, for GRAIL and for GRPO.

    python benchmarks/smollm2_outcome.py --policy FOLDER --seeds 0 1             # one run after the other
    python benchmarks/smollm2_outcome.py --policy FOLDER --jobs 2 --picture docs/smollm2.png

Runs `grail-lightning fit` as a user would, one process a run on one thread, then `grail-lightning test` of the given
and of the exported policy on test problems that were used neither in training nor for validation (data seed 1), at
temperature 1. Prints accuracy with 95 % intervals, the gain, the time of the run, the medians of its phases and its
peak memory, and draws the validation curves. `--policy` is a folder in Hugging Face format, or a name on the hub.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONFIG = "--config=configs/smollm2.yaml"
PHASES = ("speed/time/sample", "speed/time/grade", "speed/time/credit", "speed/time/update")
NAMES = {"Uniform": "GRPO"}


def call(subcommand: str, *options: str) -> str:
    """The standard output of a subcommand."""
    command = [sys.executable, "-m", "grail_lightning", subcommand, CONFIG, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def accuracy(policy: str, folder: Path, samples: int) -> tuple[float, float, float]:
    """Test accuracy with the ends of its interval."""
    table = call(
        "test", f"--model.policy={policy}", "--data.seed=1", f"--evaluation.num_samples={samples}",
        f"--trainer.logger.save_dir={folder}", "--trainer.logger.name=tests", "--trainer.enable_progress_bar=false",
    )  # fmt: skip
    found = re.search(r"^word_problems\s+\d+\s+([\d.]+) \[([\d.]+), ([\d.]+)\]", table, re.MULTILINE)
    assert found is not None, table
    return float(found[1]), float(found[2]), float(found[3])


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The figures that a run has logged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def fit(policy: str, credit: str, seed: int, folder: Path) -> Path:
    """One run; its folder. A run that is there already is not repeated."""
    name = f"{credit}_{seed}"
    if not (folder / name / "export" / "model.safetensors").is_file():
        start = time.perf_counter()
        call(
            "fit", f"--model.policy={policy}", f"--model.credit={credit}", f"--seed_everything={seed}",
            f"--trainer.logger.save_dir={folder}", f"--trainer.logger.name={name}",
            "--trainer.enable_progress_bar=false",
        )  # fmt: skip
        (folder / name / "seconds.txt").write_text(f"{time.perf_counter() - start:.0f}")
    return folder / name


def draw(runs: dict[tuple[str, int], Path], file: Path) -> None:
    """The validation curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for (credit, seed), run in runs.items():
        steps, values = zip(*scalars(run)["val/accuracy"], strict=True)
        color = {"GRAIL": "tab:blue", "Uniform": "tab:orange"}.get(credit, "tab:green")
        label = NAMES.get(credit, credit) if seed == min(s for _, s in runs) else None
        axes.plot(steps, values, color=color, label=label, marker=".")
    axes.set(xlabel="optimiser steps", ylabel="held-out accuracy", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--credits", nargs="+", default=["GRAIL", "Uniform"])
    parser.add_argument("--samples", type=int, default=2, help="responses to each test problem")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2_outcome"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before, low, high = accuracy(options.policy, options.folder, options.samples)
    print(f"before: {before:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    print("| credit | seed | after | gain | minutes | median s: sample, grade, credit, update | peak GB |")
    print("|---|--:|--:|--:|--:|---|--:|")
    jobs = [(credit, seed) for seed in options.seeds for credit in options.credits]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = dict(zip(jobs, pool.map(lambda job: fit(options.policy, *job, options.folder), jobs), strict=True))
    for (credit, seed), run in runs.items():
        after, low, high = accuracy(str(run / "export"), options.folder, options.samples)
        logged = scalars(run)
        phases = ", ".join(f"{statistics.median(v for _, v in logged[phase]):.2f}" for phase in PHASES)
        peak = max(value for _, value in logged["speed/peak_memory_gb"])
        seconds = run / "seconds.txt"
        minutes = f"{int(seconds.read_text()) / 60:.0f}" if seconds.is_file() else "?"
        print(
            f"| {NAMES.get(credit, credit)} | {seed} | {after:.3f} [{low:.3f}, {high:.3f}] "
            f"| {100 * (after - before):+.1f} points | {minutes} | {phases} | {peak:.1f} |",
            flush=True,
        )
    if options.picture:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()

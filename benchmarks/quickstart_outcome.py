"""The outcome of the quickstart: held-out accuracy before and after, for GRAIL and for GRPO, over seeds.

    python benchmarks/quickstart_outcome.py --seeds 0 1 2 --jobs 2

Runs `grail-lightning fit --config configs/quickstart.yaml` as a user would, one process a run, and then measures the
packaged and the exported policy on 512 test problems that were not used in training or for choosing settings (seed 1):
accuracy at temperature 1, greedy accuracy and pass@8. Prints one row a run and the differences.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from grail_lightning.batch import Sampling
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.functional import pass_at_k
from grail_lightning.policy import load_policy


def measure(policy_name: str) -> dict[str, float]:
    """Accuracy at temperature 1, greedy accuracy and pass@8 on the test problems."""
    # The recipe and the learning rate were chosen on the problems of seed 0.
    prompts = list(ArithmeticData(seed=1).load("test")[0].prompts)
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(load_policy(policy_name))

    def right(samples: int, temperature: float) -> torch.Tensor:
        sampling = Sampling(max_response_length=64, temperature=temperature)
        batch = engine.generate(prompts, samples, sampling, seed=12345)
        answers = [p.task.answer(t) == p.reference for t, p in zip(batch.texts, batch.prompts, strict=True)]
        return torch.tensor(answers).reshape(len(prompts), samples)

    eight = right(8, 1.0)
    return {
        "temperature 1": eight.double().mean().item(),
        "greedy": right(1, 0.0).double().mean().item(),
        "pass@8": pass_at_k(8, eight.sum(1), 8).mean().item(),
    }


def fit(credit: str, seed: int, root: Path) -> tuple[float, str]:
    """The seconds of one run in a process of its own, and its last line."""
    command = [
        *(sys.executable, "-m", "grail_lightning", "fit", "--config", "configs/quickstart.yaml"),
        *(f"--seed_everything={seed}", f"--model.credit={credit}", "--trainer.enable_progress_bar=false"),
        *(f"--trainer.logger.init_args.save_dir={root}", f"--trainer.logger.init_args.name={credit}_{seed}"),
    ]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return seconds, next(line for line in reversed(done.stdout.splitlines()) if line.startswith("held-out accuracy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--credits", nargs="+", default=["GRAIL", "Uniform"])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; timings are honest with 1 alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/outcome"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = measure("arithmetic")
    print("before: " + ", ".join(f"{name} {figure:.3f}" for name, figure in before.items()))
    print(f"| credit | seed | {' | '.join(before)} | gain at temperature 1 | whole run, s | its last line |")
    print("|---|--:|" + "--:|" * 5 + "---|")
    jobs = [(credit, seed) for seed in options.seeds for credit in options.credits]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda job: fit(*job, options.folder), jobs)
        for (credit, seed), (seconds, line) in zip(jobs, runs, strict=True):
            after = measure(str(options.folder / f"{credit}_{seed}" / "export"))
            figures = " | ".join(f"{before[name]:.3f} -> {after[name]:.3f}" for name in before)
            gain = 100 * (after["temperature 1"] - before["temperature 1"])
            print(f"| {credit} | {seed} | {figures} | {gain:+.1f} points | {seconds:.0f} | {line} |", flush=True)


if __name__ == "__main__":
    main()

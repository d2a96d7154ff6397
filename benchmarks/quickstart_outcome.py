"""The outcome of the quickstart: held-out accuracy before and after, for GRAIL and for GRPO, over seeds.

    python benchmarks/quickstart_outcome.py --seeds 0 1 2 --jobs 2

Runs `grail-lightning fit --config configs/quickstart.yaml` as a user would, one process a run, and then measures the
packaged and the exported policy on 512 test problems that were not used in training or for choosing settings (seed 1):
accuracy at temperature 1, greedy accuracy and pass@8. Prints one row a run and the differences.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SAMPLING = {"max_response_length": 64}
MEASURE = "--measure"


def measure(policy_name: str) -> dict[str, float]:
    """Accuracy at temperature 1, greedy accuracy and pass@8 on the test problems."""
    import torch

    from grail_lightning.batch import Sampling
    from grail_lightning.data import ArithmeticData
    from grail_lightning.engines import HFEngine
    from grail_lightning.functional import pass_at_k
    from grail_lightning.policy import load_policy

    # The recipe and the learning rate were chosen on the problems of seed 0.
    data = ArithmeticData(seed=1)
    (dataset,) = data.load("test")
    prompts = list(dataset.prompts)
    policy = load_policy(policy_name)
    engine = HFEngine(cache_tokens=50_000)
    engine.update_weights(policy)

    def right(samples: int, temperature: float) -> torch.Tensor:
        batch = engine.generate(prompts, samples, Sampling(temperature=temperature, **SAMPLING), seed=12345)
        answers = [p.task.answer(t) == p.reference for t, p in zip(batch.texts, batch.prompts, strict=True)]
        return torch.tensor(answers).reshape(len(prompts), samples)

    eight = right(8, 1.0)
    return {
        "temperature 1": eight.double().mean().item(),
        "greedy": right(1, 0.0).double().mean().item(),
        "pass@8": pass_at_k(8, eight.sum(1), 8).mean().item(),
        "problems": len(prompts),
    }


def run(credit: str, seed: int, root: Path) -> dict:
    """One fit in a separate process, then the measurement."""
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
    line = next(text for text in reversed(done.stdout.splitlines()) if text.startswith("held-out accuracy"))
    after = subprocess.run(
        [sys.executable, __file__, MEASURE, str(root / f"{credit}_{seed}" / "export")],
        capture_output=True,
        text=True,
        check=True,
    )
    return {"credit": credit, "seed": seed, "seconds": seconds, "line": line, "after": json.loads(after.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--credits", nargs="+", default=["GRAIL", "Uniform"])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; timings are honest with 1 alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/outcome"))
    parser.add_argument(MEASURE, metavar="POLICY", help="only measure a policy, and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = measure("arithmetic")
    names = ("temperature 1", "greedy", "pass@8")
    print(f"before ({before['problems']} test problems): " + ", ".join(f"{n} {before[n]:.3f}" for n in names))
    print("| credit | seed | " + " | ".join(names) + " | gain at temperature 1 | whole run, s | its last line |")
    print("|---|--:|" + "--:|" * 5 + "---|")
    jobs = [(credit, seed) for seed in options.seeds for credit in options.credits]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in pool.map(lambda job: run(*job, options.folder), jobs):
            figures = " | ".join(f"{before[n]:.3f} -> {done['after'][n]:.3f}" for n in names)
            gain = done["after"]["temperature 1"] - before["temperature 1"]
            print(
                f"| {done['credit']} | {done['seed']} | {figures} | {100 * gain:+.1f} points | {done['seconds']:.0f} "
                f"| {done['line']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""The coverage of the 95 % intervals in a test's table.

    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py --repetitions 4000

Each line draws that many tests of N problems with n samples, problems of one kind of difficulty with the mean `rate`:
`same` (all alike), `mild` and `wide` (a beta distribution of concentration 20 and 1), `all or nothing` (each problem is
always or never solved). The output is the share of tests whose interval contains the truth, and the mean width.
"""

import argparse
import math

import numpy as np
import torch

from grail_lightning.evaluation.statistics import mean_interval
from grail_lightning.functional import pass_at_k, pass_at_k_variance

CONCENTRATION = {"same": math.inf, "mild": 20.0, "wide": 1.0, "all or nothing": 0.0}


def chances(number: int, rate: float, concentration: float, draw: np.random.Generator) -> np.ndarray:
    if concentration in (0.0, math.inf):
        return (draw.random(number) < rate).astype(float) if not concentration else np.full(number, rate)
    return draw.beta(concentration * rate, concentration * (1 - rate), number)


def measure(
    number: int, samples: int, rate: float, concentration: float, repetitions: int, seed: int
) -> tuple[float, float]:
    """The coverage and the mean width."""
    draw = np.random.default_rng(seed)
    noise = pass_at_k_variance(samples, torch.arange(samples + 1), 1)
    held, width = 0, 0.0
    for _ in range(repetitions):
        correct = torch.from_numpy(draw.binomial(samples, chances(number, rate, concentration, draw)))
        low, high = mean_interval(pass_at_k(samples, correct, 1), noise[correct])
        held += low <= rate <= high
        width += high - low
    return held / repetitions, width / repetitions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, nargs="+", default=[30, 200, 500])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'problems':>8} {'samples':>8} {'rate':>6}" + "".join(f"{name:>18}" for name in CONCENTRATION))
    worst = 1.0
    for number in options.problems:
        for samples in options.samples:
            for rate in options.rates:
                found = [
                    measure(number, samples, rate, concentration, options.repetitions, options.seed)
                    for concentration in CONCENTRATION.values()
                ]
                worst = min(worst, *(coverage for coverage, _ in found))
                cells = "".join(f"{coverage:>10.3f} {width:>7.3f}" for coverage, width in found)
                print(f"{number:>8} {samples:>8} {rate:>6}{cells}")
    print(f"least coverage {worst:.3f}")


if __name__ == "__main__":
    main()

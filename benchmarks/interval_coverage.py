"""The coverage of the 95 % intervals of a test's table and of a report.

    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py        # 2,000 repetitions of every cell, in ten minutes
    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py --parts mean difference --problems 30

Each cell draws that many evaluations of N problems with n samples and prints the share of them whose interval contains
the truth, and the mean width. Problems are of one kind of difficulty with the mean `rate`: `same` (all alike), `mild`
and `wide` (a beta distribution of concentration 20 and 1), `all or nothing` (each problem is always or never solved).

- `mean`: the figure of one run.
- `difference`: of two runs on the same problems, whose difficulties correlate by 0 or 0.9 (a Gaussian copula). The
  second run is better by 0 and by 0.05. `found` is how often runs without a difference are told apart (p < 0.05).
- `average`: simple and weighted averages over six datasets of the published sizes whose rates differ, of one run and of
  the difference of two.
- `seeds`: a method's figure and the difference of two methods from S seeds, whose own effect has a standard deviation
  of up to 0, 0.5, 1 and 3 standard errors of the problems (evenly distributed); difficulties are `wide`, 1 sample.
- `lengths`: the mean length of all, of right and of wrong responses. The lengths of a problem's responses are lognormal
  (sigma 0.5) around e^(6 + h) tokens, where h is the probability of a wrong one. Widths are shares of the truth.
"""

import argparse
import math
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import beta

from grail_lightning.evaluate.statistics import Estimate, difference, estimate, ratio_interval
from grail_lightning.functional import pass_at_k, pass_at_k_variance

CONCENTRATION = {"same": math.inf, "mild": 20.0, "wide": 1.0, "all or nothing": 0.0}
SIZES = {"AIME24": (30, 0.1), "AMC23": (40, 0.5), "CollegeMath": (200, 0.9)} | {
    "MATH500": (500, 0.9),
    "Minerva": (272, 0.5),
    "OlympiadBench": (200, 0.1),
}
GRID = np.linspace(1e-6, 1 - 1e-6, 4001)
Draw = np.random.Generator


class Cell:
    """Counts how often intervals contain the truth, their widths, and how often a difference is found."""

    def __init__(self):
        self.held = self.found = self.number = 0
        self.width = 0.0

    def add(self, result, truth):
        self.number += 1
        self.held += result.low <= truth + 1e-12 and truth - 1e-12 <= result.high
        self.width += result.high - result.low
        self.found += getattr(result, "p_value", 1.0) < 0.05

    @property
    def coverage(self):
        return self.held / self.number

    def __str__(self):
        return f"{self.coverage:>9.3f} {self.width / self.number:>6.3f}"


def chances(rate: float, concentration: float, uniform: np.ndarray) -> np.ndarray:
    """The probabilities of problems at these quantiles."""
    if concentration in (0.0, math.inf):
        return (uniform < rate).astype(float) if not concentration else np.full(uniform.shape, rate)
    return np.interp(uniform, GRID, quantiles_of(rate, concentration))


@cache
def quantiles_of(rate: float, concentration: float) -> np.ndarray:
    return beta.ppf(GRID, concentration * rate, concentration * (1 - rate))


def tables(num_samples: int) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Shares and noise of counts of right samples."""
    counts = torch.arange(num_samples + 1)
    share = pass_at_k(num_samples, counts, 1).numpy()
    noise = pass_at_k_variance(num_samples, counts, 1).numpy()
    return lambda correct: (share[correct], noise[correct])


def pair(number: int, correlation: float, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """The quantiles of the same problems for two runs."""
    first = draw.standard_normal(number)
    return ndtr(first), ndtr(correlation * first + math.sqrt(1 - correlation**2) * draw.standard_normal(number))


def mean(options: argparse.Namespace) -> list[Cell]:
    print(f"\nmean\n{'problems':>8} {'samples':>8} {'rate':>6}" + "".join(f"{name:>18}" for name in CONCENTRATION))
    cells = []
    for number, samples, rate in product(options.problems, options.samples, options.rates):
        row, look = [], tables(samples)
        for concentration in CONCENTRATION.values():
            draw, cell = np.random.default_rng(options.seed), Cell()
            for _ in range(options.repetitions):
                p = chances(rate, concentration, draw.random(number))
                share, noise = look(draw.binomial(samples, p)[:, None])
                cell.add(estimate([share], [noise], [1.0]), rate)
            row.append(cell)
        print(f"{number:>8} {samples:>8} {rate:>6}" + "".join(f"  {cell}" for cell in row), flush=True)
        cells += row
    return cells


def difference_of_runs(options: argparse.Namespace) -> list[Cell]:
    print(f"\ndifference\n{'problems':>8} {'samples':>8} {'rate':>6} {'truth':>6} {'corr.':>6}", end="")
    print("".join(f"{name:>18}" for name in CONCENTRATION) + "   found")
    cells = []
    grid = product(options.problems, options.samples, options.rates, (0.0, 0.05), (0.0, 0.9))
    for number, samples, rate, truth, correlation in grid:
        row = [
            _difference(number, samples, rate, truth, correlation, concentration, options)
            for concentration in CONCENTRATION.values()
        ]
        found = f"{max(c.found / c.number for c in row):>8.3f}" if not truth else ""
        head = f"{number:>8} {samples:>8} {rate:>6} {truth:>6} {correlation:>6}"
        print(head + "".join(f"  {cell}" for cell in row) + found, flush=True)
        cells += row
    return cells


def _difference(number, samples, rate, truth, correlation, concentration, options):
    draw, cell, look = np.random.default_rng(options.seed), Cell(), tables(samples)
    for _ in range(options.repetitions):
        ours, theirs = pair(number, correlation, draw)
        a, noise_a = look(draw.binomial(samples, chances(rate + truth, concentration, ours))[:, None])
        b, noise_b = look(draw.binomial(samples, chances(rate, concentration, theirs))[:, None])
        cell.add(difference([a], [b], [(noise_a, noise_b)], [1.0], False), truth)
    return cell


def average(options: argparse.Namespace) -> list[Cell]:
    numbers = [number for number, _ in SIZES.values()]
    rates = [rate for _, rate in SIZES.values()]
    ways = {"simple": [1 / len(SIZES)] * len(SIZES), "weighted": [n / sum(numbers) for n in numbers]}
    print(f"\naverage\n{'of':>10} {'':>10} {'samples':>8} {'corr.':>6}" + "".join(f"{n:>18}" for n in CONCENTRATION))
    cells = []
    for samples, correlation in product(options.samples, (0.0, 0.9)):
        rows = {(what, way): [] for what in ("figure", "difference") for way in ways}
        for concentration in CONCENTRATION.values():
            for key, cell in _averages(samples, correlation, concentration, rates, ways, options).items():
                rows[key].append(cell)
        for (what, way), row in rows.items():
            print(f"{what:>10} {way:>10} {samples:>8} {correlation:>6}" + "".join(f"  {c}" for c in row), flush=True)
            cells += row
    return cells


def _averages(samples, correlation, concentration, rates, ways, options):
    draw, look = np.random.default_rng(options.seed), tables(samples)
    cells = {(what, way): Cell() for what in ("figure", "difference") for way in ways}
    for _ in range(options.repetitions):
        ours, theirs = [], []
        for number, rate in SIZES.values():
            for quantiles, side in zip(pair(number, correlation, draw), (ours, theirs), strict=True):
                side.append(look(draw.binomial(samples, chances(rate, concentration, quantiles))[:, None]))
        a, b = [t for t, _ in ours], [t for t, _ in theirs]
        noises = [(m, n) for (_, m), (_, n) in zip(ours, theirs, strict=True)]
        for way, weights in ways.items():
            cells["figure", way].add(estimate(a, [m for m, _ in noises], weights), float(np.dot(weights, rates)))
            cells["difference", way].add(difference(a, b, noises, weights, False), 0.0)
    return cells


def seeds(options: argparse.Namespace) -> list[Cell]:
    effects = (0.0, 0.5, 1.0, 3.0)
    print(f"\nseeds\n{'of':>10} {'problems':>8} {'rate':>6} {'seeds':>6}" + "".join(f"{e:>18}" for e in effects))
    cells = []
    for number, rate, count in product(options.problems, options.rates, (2, 3, 5, 8)):
        found = [_seeds(number, rate, count, effect, options) for effect in effects]
        for k, what in enumerate(("figure", "difference")):
            row = [pair_of_cells[k] for pair_of_cells in found]
            print(f"{what:>10} {number:>8} {rate:>6} {count:>6}" + "".join(f"  {c}" for c in row), flush=True)
            cells += row
    return cells


def _seeds(number, rate, count, effect, options):
    """Problems are as in `wide`; a seed adds its effect to the probability of every problem that can take it."""
    draw, look, cells = np.random.default_rng(options.seed), tables(1), (Cell(), Cell())
    # Evenly distributed, so that none leads outside of [0, 1]: there the mean would not be the rate.
    largest = min(math.sqrt(3) * effect * math.sqrt(rate * (1 - rate) / number), rate, 1 - rate)
    for _ in range(options.repetitions):
        sides = []
        for quantiles in pair(number, 0.9, draw):
            p = chances(rate, 1.0, quantiles)[:, None]
            moved = draw.uniform(-largest, largest, (1, count))
            # Towards 1 or 0 by the same share of the room that is left: the mean moves by exactly as much.
            p = np.where(moved > 0, p + (1 - p) * moved / (1 - rate), p + p * moved / rate)
            sides.append(look(draw.binomial(1, p.clip(0, 1))))
        (a, noise_a), (b, noise_b) = sides
        cells[0].add(estimate([a], [noise_a], [1.0]), rate)
        cells[1].add(difference([a], [b], [(noise_a, noise_b)], [1.0], True), 0.0)
    return cells


def lengths(options: argparse.Namespace) -> list[Cell]:
    kinds = ("all", "right", "wrong")
    print(f"\nlengths\n{'problems':>8} {'samples':>8} {'rate':>6}" + "".join(f"{kind:>18}" for kind in kinds))
    cells = []
    for number, samples, rate in product(options.problems, options.samples, options.rates):
        row = _lengths(number, samples, rate, options)
        print(f"{number:>8} {samples:>8} {rate:>6}" + "".join(f"  {cell}" for cell in row), flush=True)
        cells += row
    return cells


def _lengths(number, samples, rate, options):
    """Difficulties are `wide`. A sample in which fewer than two problems have such a response has no interval."""
    every = chances(rate, 1.0, (np.arange(100_000) + 0.5) / 100_000)
    centre = np.exp(6 + (1 - every) + 0.5**2 / 2)
    truths = [float((centre * share).sum() / share.sum()) for share in (np.ones_like(every), every, 1 - every)]
    draw, cells = np.random.default_rng(options.seed), (Cell(), Cell(), Cell())
    for _ in range(options.repetitions):
        p = chances(rate, 1.0, draw.random(number))[:, None]
        right = draw.random((number, samples)) < p
        tokens = np.exp(6 + (1 - p) + 0.5 * draw.standard_normal((number, samples)))
        for cell, kind, truth in zip(cells, (right | True, right, ~right), truths, strict=True):
            low, high = ratio_interval([(tokens * kind).sum(1)], [kind.sum(1)])
            if not math.isnan(low):
                cell.add(Estimate(value=math.nan, low=low / truth, high=high / truth), 1.0)
    return list(cells)


PARTS = {"mean": mean, "difference": difference_of_runs, "average": average, "seeds": seeds, "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--problems", type=int, nargs="+", default=[30, 200, 500])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    least = {name: min(cell.coverage for cell in PARTS[name](options)) for name in options.parts}
    print("\n" + "\n".join(f"least coverage of {name}: {value:.3f}" for name, value in least.items()))


if __name__ == "__main__":
    main()

"""The coverage of the 95 % intervals of a test's table and of a report.

    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py        # 2,000 repetitions of every cell, in ten minutes
    OMP_NUM_THREADS=1 python benchmarks/interval_coverage.py --parts mean difference --problems 30

Each cell draws that many evaluations of N problems with n samples and prints the share of them whose interval contains
the truth, and the mean width. Problems are of one kind of difficulty with the mean `rate`: `same` (all alike), `mild`
and `wide` (a beta distribution of concentration 20 and 1), `all or nothing` (each problem is always or never solved).

- `mean`: the figure of one run.
- `difference`: of two runs on the same problems, whose difficulties correlate by 0 or 0.9 (a Gaussian copula). The
  second run is better by 0 and by 0.05. `found` is how often the runs are told apart (p < 0.05), at most.
- `average`: simple and weighted averages over six datasets of the published sizes whose rates differ, of one run and of
  the difference of two.
- `seeds`: a method's figure and the difference of two methods from S seeds, whose own effect has a standard deviation
  of up to 0, 0.5, 1 and 3 standard errors of the problems (evenly distributed); difficulties are `wide`, 1 sample.
- `lengths`: the mean length of all, of right and of wrong responses. The lengths of a problem's responses are lognormal
  (sigma 0.5) around e^(6 + h) tokens, where h is the probability of a wrong one. Widths are shares of the truth.
- `training`: the difference of two methods' trainings, paired over S seeds. What a seed adds to both runs has a share
  of 0, 0.5 or 0.9 of the variance; the runs' own parts are normal, or those of one method are `skewed` (the negative of
  a gamma of shape 4: a few runs fall far). `sums` and so on draw the differences of recorded runs from uniform credit,
  each less the mean of its arm (`recorded`), which have one figure for all correlations.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import beta

from grail_lightning.app.benchmark.recorded import recorded
from grail_lightning.app.results.differences import curve_mean
from grail_lightning.app.results.statistics import Estimate, difference, estimate, ratio_interval, seeds_difference
from grail_lightning.functional import pass_at_k, pass_at_k_variance

CONCENTRATION = {"same": math.inf, "mild": 20.0, "wide": 1.0, "all or nothing": 0.0}
# Problems and rates of AIME24, AMC23, CollegeMath, MATH500, Minerva and OlympiadBench.
SIZES = ((30, 0.1), (40, 0.5), (200, 0.9), (500, 0.9), (272, 0.5), (200, 0.1))
GRID = np.linspace(1e-6, 1 - 1e-6, 4001)
Draw = np.random.Generator


class Cell:
    """Counts how often intervals contain the truth, their widths, and how often a difference is found."""

    def __init__(self) -> None:
        self.held = self.found = self.number = 0
        self.width = 0.0

    def add(self, result: Estimate, truth: float) -> None:
        self.number += 1
        self.held += result.low <= truth + 1e-12 and truth - 1e-12 <= result.high
        self.width += result.high - result.low
        self.found += getattr(result, "p_value", 1.0) < 0.05

    def __str__(self) -> str:
        return f"{self.held / self.number:.3f} {self.width / self.number:.3f}"


Rows = Iterator[tuple[dict[str, object], dict[object, Cell]]]
"""What the cells of a row have in common, and the cells."""


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


def repetitions(options: argparse.Namespace) -> Iterator[tuple[str, float, Draw]]:
    """All repetitions for each kind of difficulty, which draw from the same seed."""
    for name, concentration in CONCENTRATION.items():
        draw = np.random.default_rng(options.seed)
        for _ in range(options.repetitions):
            yield name, concentration, draw


def mean(options: argparse.Namespace) -> Rows:
    for number, samples, rate in product(options.problems, options.samples, options.rates):
        cells, look = defaultdict(Cell), tables(samples)
        for name, concentration, draw in repetitions(options):
            p = chances(rate, concentration, draw.random(number))
            cells[name].add(estimate([look(draw.binomial(samples, p)[:, None])], [1.0]), rate)
        yield {"problems": number, "samples": samples, "rate": rate}, cells


def difference_of_runs(options: argparse.Namespace) -> Rows:
    grid = product(options.problems, options.samples, options.rates, (0.0, 0.05), (0.0, 0.9))
    for number, samples, rate, truth, correlation in grid:
        cells, look = defaultdict(Cell), tables(samples)
        for name, concentration, draw in repetitions(options):
            ours, theirs = pair(number, correlation, draw)
            a = look(draw.binomial(samples, chances(rate + truth, concentration, ours))[:, None])
            b = look(draw.binomial(samples, chances(rate, concentration, theirs))[:, None])
            cells[name].add(difference([a], [b], [1.0], False), truth)
        found = max(cell.found / cell.number for cell in cells.values())
        labels = {"problems": number, "samples": samples, "rate": rate, "truth": truth, "corr.": correlation}
        yield labels | {"found": found}, cells


def average(options: argparse.Namespace) -> Rows:
    numbers, rates = zip(*SIZES, strict=True)
    ways = {"simple": [1 / len(SIZES)] * len(SIZES), "weighted": [n / sum(numbers) for n in numbers]}
    for samples, correlation in product(options.samples, (0.0, 0.9)):
        rows, look = defaultdict(lambda: defaultdict(Cell)), tables(samples)
        for name, concentration, draw in repetitions(options):
            ours, theirs = [], []
            for number, rate in SIZES:
                for quantiles, side in zip(pair(number, correlation, draw), (ours, theirs), strict=True):
                    side.append(look(draw.binomial(samples, chances(rate, concentration, quantiles))[:, None]))
            for way, weights in ways.items():
                rows["figure", way][name].add(estimate(ours, weights), float(np.dot(weights, rates)))
                rows["difference", way][name].add(difference(ours, theirs, weights, False), 0.0)
        for (what, way), cells in rows.items():
            yield {"of": what, "": way, "samples": samples, "corr.": correlation}, cells


def seeds(options: argparse.Namespace) -> Rows:
    """Problems are as in `wide`; a seed adds its effect to the probability of every problem that can take it."""
    effects = (0.0, 0.5, 1.0, 3.0)
    for number, rate, count in product(options.problems, options.rates, (2, 3, 5, 8)):
        figures, differences = defaultdict(Cell), defaultdict(Cell)
        for effect in effects:
            draw, look = np.random.default_rng(options.seed), tables(1)
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
                figures[effect].add(estimate(sides[:1], [1.0]), rate)
                differences[effect].add(difference(sides[:1], sides[1:], [1.0], True), 0.0)
        for what, cells in (("figure", figures), ("difference", differences)):
            yield {"of": what, "problems": number, "rate": rate, "seeds": count}, cells


def lengths(options: argparse.Namespace) -> Rows:
    """Difficulties are `wide`. A sample in which fewer than two problems have such a response has no interval."""
    for number, samples, rate in product(options.problems, options.samples, options.rates):
        every = chances(rate, 1.0, (np.arange(100_000) + 0.5) / 100_000)
        centre = np.exp(6 + (1 - every) + 0.5**2 / 2)
        shares = {"all": np.ones_like(every), "right": every, "wrong": 1 - every}
        truths = {kind: float((centre * share).sum() / share.sum()) for kind, share in shares.items()}
        draw, cells = np.random.default_rng(options.seed), defaultdict(Cell)
        for _ in range(options.repetitions):
            p = chances(rate, 1.0, draw.random(number))[:, None]
            right = draw.random((number, samples)) < p
            tokens = np.exp(6 + (1 - p) + 0.5 * draw.standard_normal((number, samples)))
            for (kind, truth), chosen in zip(truths.items(), (right | True, right, ~right), strict=True):
                low, high = ratio_interval([(tokens * chosen).sum(1)], [chosen.sum(1)])
                if not math.isnan(low):
                    cells[kind].add(Estimate(value=math.nan, low=low / truth, high=high / truth), 1.0)
        yield {"problems": number, "samples": samples, "rate": rate}, cells


def recorded_differences(world: str) -> np.ndarray:
    """Differences of recorded runs from uniform credit of the same seed, over training, less the mean of their arm."""
    arms = defaultdict(dict)
    for (options, seed), accuracy in recorded(world).rows.items():
        if seed < 100:  # Reported.
            arms[options][seed] = curve_mean(accuracy)
    plain = next(
        seeds
        for arm, seeds in arms.items()
        if not any(o.startswith("--model.advantage") for o in arm) and "--model.credit=Uniform" in arm
    )
    parts = [np.array([seeds[s] - plain[s] for s in plain]) for seeds in arms.values() if seeds is not plain]
    # A deviation from the mean of n has (n - 1) / n of the variance.
    return np.concatenate([(part - part.mean()) * math.sqrt(len(part) / (len(part) - 1)) for part in parts])


def training(options: argparse.Namespace) -> Rows:
    """Accuracies are shares; a run's own standard deviation is two points, and one method is three points better."""
    pools = {world: recorded_differences(world) for world in ("sums", "words", "code", "search", "charts")}
    for count, shared in product((3, 6, 8), (0.0, 0.5, 0.9)):
        cells, draw = defaultdict(Cell), np.random.default_rng(options.seed)
        for _ in range(options.repetitions):
            common = math.sqrt(shared) * draw.standard_normal(count)
            ours, theirs = draw.standard_normal((2, count))
            skewed = (4 - draw.gamma(4, size=count)) / 2
            base = 0.6 + 0.02 * (common + math.sqrt(1 - shared) * theirs)
            for name, own in (("normal", ours), ("skewed", skewed)):
                better = 0.63 + 0.02 * (common + math.sqrt(1 - shared) * own)
                cells[name].add(seeds_difference([*better], [*base], paired=True), 0.03)
            for world, pool in pools.items():
                drawn = draw.choice(pool, count) + 0.002 * draw.standard_normal(count)  # One response of 512.
                cells[world].add(seeds_difference([*(0.6 + drawn)], [0.6] * count, paired=True), float(pool.mean()))
        yield {"seeds": count, "shared": shared}, cells


PARTS = {
    "training": training,
    "mean": mean,
    "difference": difference_of_runs,
    "average": average,
    "seeds": seeds,
    "lengths": lengths,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--problems", type=int, nargs="+", default=[30, 200, 500])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    least = {}
    for name in options.parts:
        print(f"\n{name}: coverage and width")
        for row, (labels, cells) in enumerate(PARTS[name](options)):
            if not row:
                print("".join(f"{column!s:>16}" for column in (*labels, *cells)))
            print("".join(f"{cell!s:>16.14}" for cell in (*labels.values(), *cells.values())), flush=True)
            least[name] = min(least.get(name, 1.0), *(cell.held / cell.number for cell in cells.values()))
    print("\n" + "\n".join(f"least coverage of {name}: {value:.3f}" for name, value in least.items()))


if __name__ == "__main__":
    main()

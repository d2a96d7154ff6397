"""Growth of an update's time and memory with response length, group size, vocabulary and model size.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py                       # all four
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --vary length vocabulary

Random-weight Qwen3 models on seeded stand-in responses of equal length, half of them right; one GRAIL step, sampling
left out. One process a point, `--rounds` of them, medians. The exponent is the slope of a straight line through the
logarithms: 1 is linear growth. Attention alone is quadratic in the length. Memory is the peak of resident size over
what was there before the step (weights, tokenizer); the weights' gradients are part of it.
"""

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time

import torch
from stand_in import StandInTask, random_qwen3, stand_in_responses

from grail_lightning.batch import GradedBatch
from grail_lightning.credit import GRAIL, CreditContext
from grail_lightning.engines.base import build_batch
from grail_lightning.functional import group_advantages
from grail_lightning.grading.locate import align_rows, answer_masks
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.step.assign import assign_credit
from grail_lightning.step.options import Execution, Objective
from grail_lightning.step.update import prepare

BASE = {"length": 128, "group": 8, "vocabulary": 8192, "width": 256}
POINTS = {
    "length": [64, 128, 256, 512],
    "group": [4, 8, 16, 32],
    "vocabulary": [8192, 32768, 65536, 151936],
    "width": [128, 256, 512, 768],
}


def measure(length: int, group: int, vocabulary: int, width: int) -> None:
    """Print seconds and MiB of one step in this process, and the number of parameters."""
    torch.set_num_threads(1)
    policy = random_qwen3(hidden=width, layers=4, vocabulary=vocabulary).train()
    prompts = [StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in (11, 12)]

    def step(length: int, size: int) -> None:
        responses = stand_in_responses(policy.tokenizer, 2, size, (length, length), seed=0)
        batch = build_batch(policy, prompts, size, responses, [True] * len(responses))
        right = torch.tensor([1.0] * (size // 2) + [0.0] * (size - size // 2)).repeat(2)
        graded = GradedBatch(
            **batch.fields(),
            answer=answer_masks(batch, align_rows(batch, policy.tokenizer)),
            rewards=right,
            correct=right > 0,
            verdicts=[None] * len(batch),
        )
        ready = graded.with_advantages(group_advantages(right, size))
        objective, execution = Objective(), Execution(group_size=size, token_budget=1024)
        context = CreditContext(step=0, generator=torch.Generator().manual_seed(0), token_budget=1024)
        clock = PhaseClock(policy.device)
        forward, weights = assign_credit(GRAIL(), None, policy, ready, context, objective, clock)
        update = prepare(forward, weights, objective, execution, None, limit=length, seed=0)
        for number in range(len(update.plan.steps)):
            update.accumulate(number, lambda loss, last: loss.backward(), in_place=True)
        policy.zero_grad(set_to_none=True)

    step(16, 2)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    step(length, group)
    seconds = time.process_time() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(seconds, peak, sum(p.numel() for p in policy.parameters()))


def exponent(sizes: list[float], values: list[float]) -> float:
    """The slope of ``log value`` over ``log size``, least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", nargs="+", choices=list(POINTS), default=list(POINTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--point", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        return measure(*options.point)
    for name in options.vary:
        print(f"\n| {name} | parameters, M | processor seconds | peak MiB |\n|--:|--:|--:|--:|")
        sizes, rows = [], []
        for value in POINTS[name]:
            point = [str(v) for v in (BASE | {name: value}).values()]
            command = [sys.executable, __file__, "--point", *point]
            outs = [
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-3:]
                for _ in range(options.rounds)
            ]
            seconds, peak, parameters = (
                statistics.median(float(v) for v in found) for found in zip(*outs, strict=True)
            )
            print(f"| {value} | {parameters / 1e6:.1f} | {seconds:.2f} | {peak:.0f} |", flush=True)
            sizes.append(parameters if name == "width" else value)
            rows.append((seconds, peak))
        of_time, of_memory = (exponent(sizes, list(column)) for column in zip(*rows, strict=True))
        against = "parameters" if name == "width" else name
        print(f"\nexponents against {against}: time {of_time:.2f}, memory {of_memory:.2f}")
    return None


if __name__ == "__main__":
    main()

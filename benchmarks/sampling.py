"""Tokens a second of the two ways in which `HFEngine` samples, alternating in one process.

    python benchmarks/sampling.py --case quickstart
    python benchmarks/sampling.py --case 34m
    python benchmarks/sampling.py --case vocabulary

Both sides draw from the same distributions with the same seeds, so that they do the same work on average; each is
reported by its own tokens. Wall time suffers from other work on the machine, processor time does not.
"""

import argparse
import statistics
import time

import torch
from stand_in import random_qwen3

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.policy import load_policy
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.arithmetic import ProblemSpace
from grail_lightning.tasks.base import Prompt


def quickstart():
    """The packaged policy and prompts, as a step of the quickstart samples them."""
    return load_policy("arithmetic"), Sampling(max_response_length=64)


def thirty_four_million():
    """Random weights; responses end at random, about 70 tokens of at most 128."""
    return with_end(random_qwen3(512, 8, 8192), 1 / 85), Sampling(max_response_length=128)


def vocabulary():
    """Few layers behind Qwen3's vocabulary: the head and the draw dominate."""
    return with_end(random_qwen3(192, 4, 151_936), 1 / 20), Sampling(max_response_length=32)


def with_end(policy, probability):
    """Give the end token about `probability` at every step, through the head's own bias."""
    head = policy.model.get_output_embeddings()
    others = policy.model.config.vocab_size - 1
    head.bias = torch.nn.Parameter(torch.zeros(others + 1))
    # The other logits are close to N(0, s²) with small s at this initialisation, so that they sum to about `others`.
    head.bias.data[policy.end_token_ids[0]] = torch.tensor(probability / (1 - probability) * others).log()
    return policy


CASES = {"quickstart": quickstart, "34m": thirty_four_million, "vocabulary": vocabulary}


def prompts(number):
    task = ArithmeticTask()
    problems = ProblemSpace().sample(number, "train", 0)
    return [Prompt(messages=task.prompt({"problem": p.expression}).messages, reference="", task=task) for p in problems]


def timed(engine, asked, group_size, sampling, seed):
    """Wall and processor seconds, and the tokens that were sampled."""
    cuda = torch.cuda.is_available()
    wall, processor = time.perf_counter(), time.process_time()
    batch = engine.generate(asked, group_size, sampling, seed)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor, int(batch.response_mask.sum())


def measure(case, repeats, device):
    policy, sampling = CASES[case]()
    policy = policy.to(device)
    sides = {"generate": HFEngine(method="generate"), "compact": HFEngine(method="compact")}
    asked, group_size = prompts(16), 8 if case == "quickstart" else 4
    for engine in sides.values():
        engine.update_weights(policy)
        timed(engine, asked, group_size, sampling, 0)
    taken = {name: [] for name in sides}
    for seed in range(1, repeats + 1):
        for name, engine in sides.items():
            taken[name].append(timed(engine, asked, group_size, sampling, seed))
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="quickstart")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    taken = measure(args.case, args.repeats, args.device)
    print(f"{args.case}: medians of {args.repeats}, alternating\n")
    print("| method | wall s | processor s | tokens | tokens / wall s | tokens / processor s |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, runs in taken.items():
        wall, processor, tokens = (statistics.median(column) for column in zip(*runs, strict=True))
        speeds = [statistics.median(run[2] / run[k] for run in runs) for k in (0, 1)]
        print(f"| {name} | {wall:.3f} | {processor:.3f} | {tokens:.0f} | {speeds[0]:,.0f} | {speeds[1]:,.0f} |")
    pairs = list(zip(taken["generate"], taken["compact"], strict=True))
    ratio = [statistics.median((new[k] / new[2]) / (old[k] / old[2]) for old, new in pairs) for k in (0, 1)]
    print(
        f"\ncompact / generate: {ratio[0]:.2f} by wall, {ratio[1]:.2f} by processor time (seconds a token, median pair)"
    )


if __name__ == "__main__":
    main()

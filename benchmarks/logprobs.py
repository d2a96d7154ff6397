"""Log-probabilities and entropy over a large vocabulary, forward and backward: our chunks compared with full logits.

    OMP_NUM_THREADS=1 python benchmarks/logprobs.py                       # 4 × 1024 tokens, V = 151,936, width 512
    OMP_NUM_THREADS=1 python benchmarks/logprobs.py --tokens 512 --width 128

One process a side and round: seconds, and the peak of resident memory above the memory before (states, head, ids).
"full logits" makes ``[tokens, V]`` logits, takes log-softmax and gather, and the entropy without gradient, as the plain
implementation of GRPO does. "autograd, chunks" is checkpointed chunks without the backward pass that is written out.
Ours is as in training on one device: a head that is a product, whose gradient is added up in place.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

from grail_lightning.functional.tokens import token_logprobs


def full_logits(states, head, ids):
    logits = head(states).float()
    logs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, ids[:, None]).squeeze(-1), entropy


def chunks(states, head, ids):
    return token_logprobs(states, head, ids, with_entropy=True)


def written_out(states, head, ids):
    more = {"trained": [head.weight], "weight": head.weight, "add_up": lambda: True}
    return token_logprobs(states, head, ids, with_entropy=True, **more)


SIDES = {"ours": written_out, "autograd, chunks": chunks, "full logits": full_logits}


def measure(side: str, tokens: int, width: int, vocabulary: int) -> None:
    """Print seconds and MiB of one forward and backward pass in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    ids = torch.randint(vocabulary, (tokens,))
    SIDES[side](states[:2], head, ids[:2])[0].sum().backward()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    logprobs, _ = SIDES[side](states, head, ids)
    (logprobs * torch.linspace(-1, 1, tokens)).sum().backward()
    seconds = time.perf_counter() - start
    print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [str(value) for value in (options.tokens, options.width, options.vocabulary)]
    if options.side:
        return measure(options.side, *map(int, sizes))
    command = [sys.executable, __file__, "--tokens", sizes[0], "--width", sizes[1], "--vocabulary", sizes[2]]
    found = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side in SIDES:
            out = subprocess.run([*command, "--side", side], capture_output=True, text=True, check=True).stdout
            found[side].append([float(value) for value in out.split()])
    print(f"{sizes[0]} tokens, width {sizes[1]}, vocabulary {sizes[2]}, {options.rounds} rounds, medians")
    print("| | seconds | beside full logits | peak MiB | beside full logits |\n|---|--:|--:|--:|--:|")
    median = {side: [statistics.median(values) for values in zip(*rows, strict=True)] for side, rows in found.items()}
    theirs = median["full logits"]
    for side, (seconds, memory) in median.items():
        print(f"| {side} | {seconds:.2f} | {seconds / theirs[0]:.2f} | {memory:.0f} | {memory / theirs[1]:.2f} |")
    return None


if __name__ == "__main__":
    main()

"""Peak memory and time of the KL to a teacher at a large vocabulary: in chunks, and with all logits at once.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py

Each side runs forward and backward pass in a process of its own; the figures are the peak of the process above the
memory before, and the seconds. `--tokens` rows of width `--width`, and a head of `--vocabulary` outputs.
"""

import argparse
import multiprocessing
import resource
import time

import torch

from grail_lightning.functional.certainty import teacher_divergence


def whole(hidden: torch.Tensor, teacher: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
    own = head(hidden).log_softmax(-1)
    with torch.no_grad():
        other = head(teacher).log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1)


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def side(name: str, options: argparse.Namespace, results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    teacher = hidden.detach() + 0.1 * torch.randn(options.tokens, options.width)
    head = torch.nn.Linear(options.width, options.vocabulary, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    before, start = peak_gb(), time.perf_counter()
    if name == "chunks":
        found = teacher_divergence(hidden, teacher, head, chunk_tokens=options.chunk_tokens)
    else:
        found = whole(hidden, teacher, head)
    found.sum().backward()
    assert hidden.grad is not None
    results.put((peak_gb() - before, time.perf_counter() - start, found.sum().item(), hidden.grad.abs().sum().item()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    table = options.tokens * options.vocabulary * 4 / 2**30
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}: one table of logits is {table:.2f} GiB")
    for name in ("chunks", "all logits"):
        results = spawn.Queue()
        process = spawn.Process(target=side, args=(name, options, results))
        process.start()
        memory, seconds, total, slope = results.get()
        process.join()
        print(f"{name:>10}: {memory:.2f} GiB, {seconds:.1f} s, KL {total:.6g}, gradient {slope:.6g}")


if __name__ == "__main__":
    main()

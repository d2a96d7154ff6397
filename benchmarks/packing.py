"""Forward and backward pass of a policy over uneven rows: padded, and packed.

    OMP_NUM_THREADS=1 python benchmarks/packing.py --case quickstart | 30m     # --device cuda for flash-attn

Rows are cut into micro-batches as the update does (sorted by length), or into micro-batches of random rows, with more
padding. CPU seconds of the process and their ratio to padded rows, medians; sides alternate.
"""

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import torch
from transformers import Qwen3Config

from grail_lightning.batch import micro_batches
from grail_lightning.policy import Loading, load_policy, load_tokenizer

SIDES = {
    "padded": {},
    "packed": {"packing": True},
}
# Rows, prompt lengths, response lengths, token budget.
CASES = {"quickstart": (128, (10, 16), (16, 64), 8192), "30m": (8, (16, 64), (32, 256), 2048)}


class Rows(NamedTuple):
    """The tensors from which a layout is made."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor


def make_policy(case: str, folder: str, **options):
    if case == "quickstart":
        return load_policy("arithmetic", Loading(**options))
    tokenizer = load_tokenizer("arithmetic")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    Qwen3Config(**sizes, **heads, **ends).save_pretrained(folder)
    return load_policy(folder, Loading(from_scratch=True, **options))


def make_rows(case: str, cut: str):
    """Micro-batches of ``(input_ids, attention_mask, response_mask)``, and the share of padding."""
    count, prompts, responses, budget = CASES[case]
    random = torch.Generator().manual_seed(0)
    lengths = [torch.randint(low, high + 1, (count,), generator=random) for low, high in (prompts, responses)]
    if cut == "sorted":
        parts = micro_batches(torch.stack(lengths, 1), budget, torch.arange(count))
    else:
        parts = torch.randperm(count, generator=random).split(max(budget // (prompts[1] + responses[1]), 1))
    made = []
    for part in parts:
        prompt, response = lengths[0][part], lengths[1][part]
        left, right = int(prompt.max()), int(response.max())
        response_mask = torch.arange(right) < response[:, None]
        mask = torch.cat([torch.arange(left) >= left - prompt[:, None], response_mask], 1)
        ids = torch.randint(3, 400, mask.shape, generator=random)
        made.append((ids, mask, response_mask))
    tokens = sum(int(mask.sum()) for _, mask, _ in made)
    return made, 1 - tokens / sum(mask.numel() for _, mask, _ in made)


def run(policy, rows) -> float:
    """CPU seconds (wall seconds on a GPU) of forward and backward over all micro-batches."""
    clock = time.process_time if policy.device.type == "cpu" else time.perf_counter
    start = clock()
    for piece in rows:
        policy(policy.layout(Rows(*(tensor.to(policy.device) for tensor in piece)))).logprobs.sum().backward()
    policy.zero_grad()
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="quickstart")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    half = options.device == "cuda"
    policies = {}
    for side in options.sides:
        policies[side] = make_policy(options.case, folder.name, dtype="bfloat16" if half else "float32", **SIDES[side])
        policies[side].train().to(options.device)
    print("| rows | padding | side | seconds | beside padded |\n|---|--:|---|--:|--:|")
    for cut in ("sorted", "random"):
        rows, padding = make_rows(options.case, cut)
        seconds = {side: [] for side in policies}
        for policy in policies.values():
            run(policy, rows)  # To warm up.
        for _ in range(options.rounds):
            for side, policy in policies.items():
                seconds[side].append(run(policy, rows))
        median = {side: statistics.median(values) for side, values in seconds.items()}
        for side in policies:
            print(
                f"| {cut}, {len(rows)} micro-batches | {padding:.0%} | {side} | {median[side]:.2f} | "
                f"{median[side] / median[options.sides[0]]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

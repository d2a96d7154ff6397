"""The cost of OAR-P: a shared prefix compared with whole sequences, and its memory by response length.

    OMP_NUM_THREADS=1 python benchmarks/perturbation_cost.py --case quickstart
    OMP_NUM_THREADS=1 python benchmarks/perturbation_cost.py --case 30m
    OMP_NUM_THREADS=1 python benchmarks/perturbation_cost.py --case memory

`quickstart` scores responses that the packaged policy samples; `30m` one response of 256 tokens behind a prompt of 64,
by a random-weight Qwen3 of about 30 million parameters. Both alternate the two ways in one process and print median
CPU seconds. `memory` runs each response length in a process of its own, with a small random-weight Qwen3, and prints
how much the scoring adds to the peak of its resident memory: within a token budget of 2048, and all sequences at once.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from grail_lightning.batch import AnswerMasks, RolloutBatch, Sampling
from grail_lightning.credit.oar import perturbation_scores
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.grading.locate import align_rows, answer_masks
from grail_lightning.policy import Policy, load_policy

PROMPT, ANSWER = 64, 8
LENGTHS = (64, 128, 256, 512)
ALL_AT_ONCE = 10**9


def random_policy(width: int, blocks: int) -> Policy:
    """Random weights behind the packaged tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=1024, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Policy(AutoModelForCausalLM.from_config(config).eval(), load_policy("arithmetic").tokenizer)


def stand_in(length: int) -> RolloutBatch:
    """One random response of a given length that ends on its answer."""
    ids = torch.randint(3, 8192, (1, PROMPT + length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones(1, length, dtype=torch.bool)
    whole = torch.arange(length)[None] >= length - ANSWER
    none = torch.zeros_like(mask)
    return RolloutBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        response_ids=ids[:, PROMPT:],
        response_mask=mask,
        group=torch.zeros(1, dtype=torch.long),
        row=torch.zeros(1, dtype=torch.long),
        finished=mask[:, 0],
        prompts=[None],
        texts=[""],
        answer=AnswerMasks(whole=whole, content=whole, marker=none, after=none),
    )


def sampled(policy: Policy) -> RolloutBatch:
    """128 responses as the quickstart samples them."""
    engine = HFEngine()
    engine.update_weights(policy)
    (problems,) = ArithmeticData(num_train=16).load("train")
    batch = engine.generate(problems.prompts, 8, Sampling(max_response_length=64), seed=0)
    return batch.replace(answer=answer_masks(batch, align_rows(batch, policy.tokenizer)))


def compare(policy: Policy, batch: RolloutBatch, budget: int, rounds: int) -> None:
    """Print median CPU seconds of both ways, alternating: other work on the machine does not count."""
    rows = batch.answer.whole.any(1).nonzero().flatten()
    seconds, scores = {True: [], False: []}, {}
    for _ in range(rounds):
        for share, laps in seconds.items():
            start = time.process_time()
            scores[share] = perturbation_scores(policy, batch, rows, token_budget=budget, share_prefix=share)
            laps.append(time.process_time() - start)
    shared, plain = statistics.median(seconds[True]), statistics.median(seconds[False])
    gap = (scores[True] - scores[False]).abs().max() / scores[False].abs().max()
    length = batch.response_lengths[rows].float().mean()
    print(f"{len(rows)} rows of {length:.0f} tokens on average, token budget {budget}, {rounds} rounds")
    print(f"CPU seconds: whole {plain:.2f}, shared {shared:.2f}, ratio {plain / shared:.2f}; largest gap {gap:.1e}")


def peak(length: int, budget: int, share: bool) -> float:
    """MiB that scoring one response adds to the peak of this process."""
    policy = random_policy(128, 4)
    perturbation_scores(policy, stand_in(16), torch.tensor([0]), token_budget=256, share_prefix=share)  # warm
    batch = stand_in(length)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    perturbation_scores(policy, batch, torch.tensor([0]), token_budget=budget, share_prefix=share)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - resident


def memory() -> None:
    """Print the peaks of all lengths."""
    print("| response tokens | shared, MiB | whole, MiB | all sequences at once, MiB |\n|--:|--:|--:|--:|")
    for length in LENGTHS:
        cells = []
        for budget, share in ((2048, True), (2048, False), (ALL_AT_ONCE, False)):
            call = [sys.executable, __file__, "--case", "peak", "--peak", str(length), str(budget), str(int(share))]
            done = subprocess.run(call, check=True, capture_output=True, text=True)
            cells.append(f"{float(done.stdout.split()[-1]):.0f}")
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["quickstart", "30m", "memory", "peak"], default="quickstart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--peak", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    match options.case:
        case "quickstart":
            policy = load_policy("arithmetic").eval()
            compare(policy, sampled(policy), options.budget, options.rounds)
        case "30m":
            compare(random_policy(512, 8), stand_in(256), options.budget, options.rounds)
        case "memory":
            memory()
        case "peak":
            length, budget, share = options.peak
            print(peak(length, budget, bool(share)))


if __name__ == "__main__":
    main()

"""Forward and backward passes of one optimiser step with each prompt run once, beside once for each of its responses.

    OMP_NUM_THREADS=1 python benchmarks/shared_prompts.py --prompts 4 --group 8 --prompt 16 64 128 --response 64 256
    OMP_NUM_THREADS=1 python benchmarks/shared_prompts.py --packaged --prompts 16 --prompt 11 --response 26 44

Random rows in groups; responses of uneven length up to `--response` tokens, at least half of it with one number. By
default a trunk of 30 million parameters with random weights. CPU seconds of the process, medians; the sides alternate.
"""

import argparse
import statistics
import time

import torch
from stand_in import random_qwen3

from grail_lightning.objective import Objective, saved_by_sharing
from grail_lightning.policy import Policy, load_policy
from grail_lightning.rollout import RolloutBatch, Sampling, lengths_to_mask
from grail_lightning.update import Update


def rollouts(prompts: int, group: int, prompt: int, response: tuple[int, int]) -> RolloutBatch:
    """Random tokens; prompts are up to a quarter shorter than `prompt`."""
    random = torch.Generator().manual_seed(0)
    rows = prompts * group
    begun = torch.randint(prompt - prompt // 4, prompt + 1, (prompts,), generator=random).repeat_interleave(group)
    lengths = torch.randint(response[0], response[1] + 1, (rows,), generator=random)
    left, right = int(begun.max()), int(lengths.max())
    ids = torch.randint(3, 400, (prompts, left), generator=random).repeat_interleave(group, 0)
    response_ids = torch.randint(3, 400, (rows, right), generator=random)
    mask = lengths_to_mask(lengths, right)
    return RolloutBatch(
        input_ids=torch.cat([ids, response_ids], 1),
        attention_mask=torch.cat([torch.arange(left) >= left - begun[:, None], mask], 1),
        response_ids=response_ids,
        response_mask=mask,
        group=torch.arange(prompts).repeat_interleave(group),
        row=torch.arange(rows),
        finished=torch.ones(rows, dtype=torch.bool),
        prompts=[None] * rows,
        texts=[""] * rows,
        advantages=torch.randn(rows, generator=random),
    )


def step(policy: Policy, batch: RolloutBatch, share: bool, budget: int) -> float:
    """CPU seconds; no optimiser."""
    objective = Objective(token_budget=budget, share_prompts=share)
    update = Update(policy, None, batch, objective, Sampling(max_response_length=batch.response_mask.shape[1]), 0)
    (rows,) = update.plan(torch.ones(batch.response_mask.shape), None)
    start = time.process_time()
    update.accumulate(rows, lambda loss, last: loss.backward())
    policy.zero_grad()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packaged", action="store_true", help="the packaged policy instead of the trunk")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 64, 128], help="tokens, most")
    parser.add_argument("--response", type=int, nargs="+", default=[64, 128], help="tokens, least and most")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    small = {"hidden": 512, "layers": 10, "vocabulary": 512, "tie_word_embeddings": True}
    policy = (load_policy("arithmetic") if options.packaged else random_qwen3(**small)).train()
    print("| prompt | response | tokens saved | apart, s | shared, s | ratio |\n|--:|--:|--:|--:|--:|--:|")
    low, high = (
        (options.response * 2)[:2] if len(options.response) > 1 else (options.response[0] // 2, *options.response)
    )
    for prompt in options.prompt:
        batch = rollouts(options.prompts, options.group, prompt, (low, high))
        saved = saved_by_sharing(batch, torch.arange(len(batch)))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.rounds + 1):
            for share in (True, False) if turn % 2 else (False, True):
                took = step(policy, batch, share, options.budget)
                seconds[share] += [took] if turn else []  # The first is to warm up.
        apart, shared = statistics.median(seconds[False]), statistics.median(seconds[True])
        print(
            f"| {prompt} | {low}-{high} | {saved:.0%} | {apart:.2f} | {shared:.2f} | {shared / apart:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()

"""Forward and backward passes of one optimiser step: every row by itself, and common prefixes run once.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefixes.py --prompts 4 --group 8 --prompt 16 64 128 --response 64 256
    OMP_NUM_THREADS=1 python benchmarks/shared_prefixes.py --packaged --prompts 16 --prompt 11 --response 44 --common 9

Random rows in groups; responses of uneven length up to `--response` tokens, at least half of it with one number, and
`--common` tokens with which all of a group begin. By default a trunk of 30 million parameters with random weights. CPU
seconds of the process, medians; the sides alternate. "prompts" shares prompts alone, as for rows that need separate
saliency; "prefixes" is what `execution.share_prefixes` does for all others. `--checkpointed` recomputes activations.
"""

import argparse
import itertools
import statistics
import time

import torch
from stand_in import random_qwen3

from grail_lightning.batch import AnswerMasks, RolloutBatch, lengths_to_mask
from grail_lightning.policy import Policy, load_policy
from grail_lightning.policy.micro_batch import cut_rows


def rollouts(prompts: int, group: int, prompt: int, response: tuple[int, int], common: int) -> RolloutBatch:
    """Random tokens; prompts are up to a quarter shorter than `prompt`."""
    random = torch.Generator().manual_seed(0)
    rows = prompts * group
    begun = torch.randint(prompt - prompt // 4, prompt + 1, (prompts,), generator=random).repeat_interleave(group)
    lengths = torch.randint(response[0], response[1] + 1, (rows,), generator=random)
    left, right = int(begun.max()), int(lengths.max())
    ids = torch.randint(3, 400, (prompts, left), generator=random).repeat_interleave(group, 0)
    response_ids = torch.randint(3, 400, (rows, right), generator=random)
    response_ids[:, :common] = response_ids[::group, :common].repeat_interleave(group, 0)
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
        answer=AnswerMasks(whole=mask, content=mask, marker=mask, after=mask),
        rewards=torch.zeros(rows),
        correct=torch.zeros(rows, dtype=torch.bool),
        verdicts=[None] * rows,
    )


SIDES = ("apart", "prompts", "prefixes")


def step(policy: Policy, batch: RolloutBatch, side: str, budget: int) -> tuple[float, int]:
    """CPU seconds, and how many tokens were run; no optimiser."""
    start, tokens = time.process_time(), 0
    how = {"share": side != "apart", "share_responses": side == "prefixes"}
    for micro in cut_rows(policy, batch, torch.arange(len(batch)), budget, **how):
        piece = batch.select(micro.rows)
        layout = policy.layout(piece, micro.starts, share_responses=side == "prefixes")
        logprobs = policy(layout, with_entropy=True, in_place=True).logprobs
        (logprobs * batch.advantages[micro.rows, None]).sum().backward()
        tokens += layout.num_tokens
    policy.zero_grad()
    return time.process_time() - start, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointed", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--packaged", action="store_true", help="the packaged policy instead of the trunk")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 64, 128], help="tokens, most")
    parser.add_argument("--response", type=int, nargs="+", default=[64, 128], help="tokens, least and most")
    parser.add_argument("--common", type=int, nargs="+", default=[0], help="tokens that a group's responses begin with")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    small = {"hidden": 512, "layers": 10, "vocabulary": 512, "tie_word_embeddings": True}
    policy = (load_policy("arithmetic") if options.packaged else random_qwen3(**small)).train()
    if options.checkpointed:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    print("| prompt | common | response | tokens run: prompts, prefixes | apart, s | prompts | prefixes |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    low, high = (
        (options.response * 2)[:2] if len(options.response) > 1 else (options.response[0] // 2, *options.response)
    )
    for prompt, common in itertools.product(options.prompt, options.common):
        batch = rollouts(options.prompts, options.group, prompt, (low, high), common)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        tokens: dict[str, int] = {}
        for turn in range(options.rounds + 1):
            for side in SIDES if turn % 2 else SIDES[::-1]:
                took, tokens[side] = step(policy, batch, side, options.budget)
                seconds[side] += [took] if turn else []  # The first turn warms up.
        apart, *others = (statistics.median(seconds[side]) for side in SIDES)
        shares = ", ".join(f"{tokens[side] / tokens['apart']:.0%}" for side in SIDES[1:])
        cells = [shares, f"{apart:.2f}"] + [f"{other / apart:.2f}" for other in others]
        print(f"| {prompt} | {common} | {low}-{high} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

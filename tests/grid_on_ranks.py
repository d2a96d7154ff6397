"""The gradient of one optimiser step on two processes, for every objective.

One has a group of rollouts, the other two, of which one is dead.
"""

import itertools
import os

import torch
import torch.distributed as dist

from grail_lightning.batch import Sampling
from grail_lightning.credit import CreditContext
from grail_lightning.policy import load_policy
from grail_lightning.step.advantages import compute_advantages
from grail_lightning.step.options import Objective
from tests.batches import graded
from tests.processes import group
from tests.runs import problems, sampled
from tests.steps import KL, update_of

SAMPLING = Sampling(max_response_length=36)
SCALES = ("none", "group", "batch", "bnpo")
BASELINES = (1.0, "energy", 0.5)
GRID = [  # Every KL with every aggregation, and every scaling and every baseline with every aggregation.
    {"aggregation": how, "scale_rewards": SCALES[number % 4], "baseline": BASELINES[number % 3], **kl}
    for number, (how, kl) in enumerate(itertools.product(("grpo", "dr_grpo", "dapo"), KL))
]


def gradient(policy, reference, batch, weights, options):
    """Of all weights, end to end, as DDP has it: the mean over the ranks; and how many micro-batches there were."""
    objective = Objective(scale_rewards=options["scale_rewards"], baseline=options["baseline"])
    context = CreditContext(step=0, generator=torch.Generator(), token_budget=200)
    batch = compute_advantages(batch, 4, objective, policy, context)
    policy.zero_grad()
    frozen = reference if options.get("kl_coefficient") else None
    how = {"limit": SAMPLING.max_response_length, "token_budget": 200, "share_prefixes": False}
    update, number = update_of(policy, batch, weights, frozen, **how, **options), 0

    def backward(loss, last):
        nonlocal number
        number += 1
        loss.backward()

    metrics = update.accumulate(0, backward)
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found, metrics, number


def compare():
    """Of each objective: how far the gradient of both is from that of one process, the losses, and the passes."""
    policy, reference = load_policy("arithmetic").double().train(), load_policy("arithmetic", trainable=False).double()
    for p in reference.parameters():
        p.data *= 1.01
    batch = sampled(policy, problems(3), 4, SAMPLING, seed=1)
    batch = graded(batch, torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0], dtype=torch.float64))
    weights = (
        torch.rand(batch.response_mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.5
    )
    # By one process; each of the two works out half of the grid.
    halves = [
        gradient(policy, reference, batch, weights, options)[:2] for options in GRID[int(os.environ["RANK"]) :: 2]
    ]
    with group() as rank:
        both = [None, None]
        dist.all_gather_object(both, halves)
        expected = [both[k % 2][k // 2] for k in range(len(GRID))]
        rows = torch.arange(4, 12) if rank else torch.arange(4)
        mine = batch.select(rows)
        weights = weights[rows, : mine.response_mask.shape[1]]
        report = []
        for options, (alone, metrics) in zip(GRID, expected, strict=True):
            found, ours, number = gradient(policy, reference, mine, weights, options)
            gap = ((found - alone).abs().max() / alone.abs().max()).item()
            report.append({"options": options, "gap": gap, "loss": [ours["loss"], metrics["loss"]], "backward": number})
        return report

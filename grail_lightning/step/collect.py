"""Collection of a batch: on policy or one batch ahead; groups that are all right or all wrong may be replaced.

Shapes: ``B`` rows in ``K`` groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.batch import GradedBatch
from grail_lightning.batch.rows import join
from grail_lightning.runtime.collectives import all_reduce, sum_by_name, world_size
from grail_lightning.step.ahead import Ahead
from grail_lightning.step.options import Execution
from grail_lightning.step.sampler import Sampler, training_key
from grail_lightning.tasks.base import Prompt


def collect(
    prompts: list[Prompt], sampler: Sampler, ahead: Ahead, loader: object, execution: Execution, step: int
) -> tuple[GradedBatch, dict[str, float]]:
    """The graded rollouts of a training batch, and figures to log, over all ranks.

    `step` is the number of optimiser steps that the policy has taken.
    """
    if execution.sample_ahead:
        peek = _that_can("peek", loader, "sample_ahead", "`peek` at its next batch", off="false")
        return ahead.collect(prompts, sampler, peek, step, execution.steps_per_batch)
    return refill(
        sampler(prompts, training_key(step)),
        lambda further, number: sampler(further, training_key(step, number)),
        loader,
        execution.refill_rounds,
    )


def refill(
    batch: GradedBatch, sample: Callable[[list[Prompt], int], GradedBatch], loader: object, rounds: int
) -> tuple[GradedBatch, dict[str, float]]:
    """Replace groups that are all right or all wrong, as far as `rounds` further samplings allow.

    The further prompts are the training loader's next ones, so that a resumed run continues with the right prompt. The
    criterion is correctness, not the reward: a shaped reward may differ between responses that are all right or all
    wrong. All ranks sample the same number of times.

    `sample` is a function from prompts and the number of the round to graded groups.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    if not rounds:
        return batch, {}
    take = _that_can("take", loader, "refill_rounds", "`take` further prompts", off=0)
    groups = float(len(uniform_groups(batch)))
    drawn, right, made = groups, float(batch.correct.sum()), 0
    for made in range(1, rounds + 1):
        dead = uniform_groups(batch)
        most = int(all_reduce(dead.sum().to(batch.input_ids.device), "max"))
        if not most:
            made -= 1
            break
        fresh = sample(take(most * world_size()), made)
        drawn, right = drawn + len(uniform_groups(fresh)), right + float(fresh.correct.sum())
        batch = _replace(batch, fresh)
    total = sum_by_name({"drawn": drawn, "right": right, "kept": groups})
    size = len(batch) / max(groups, 1)
    return batch, {
        "refill/rounds": float(made),
        "refill/drawn_groups": total["drawn"],
        "refill/dropped_groups": total["drawn"] - total["kept"],
        "refill/accuracy_drawn": total["right"] / max(total["drawn"] * size, 1),
    }


def check_loader(loader: object, execution: Execution) -> None:
    """Check that the loader supports what is to be sampled beside its batches, before training begins."""
    if execution.refill_rounds:
        _that_can("take", loader, "refill_rounds", "`take` further prompts", off=0)
    if execution.sample_ahead:
        _that_can("peek", loader, "sample_ahead", "`peek` at its next batch", off="false")


def _that_can(method: str, loader: object, option: str, what: str, *, off: object) -> Callable[..., list[Prompt]]:
    """A method of the training loader that the loaders of `grail_lightning.data` have, and others may lack."""
    function: Callable[..., list[Prompt]] | None = getattr(loader, method, None)
    if function is None:
        raise ValueError(
            f"`execution.{option}` needs a training loader that can {what}, but got {type(loader).__name__}. Use a "
            f"data module of grail_lightning.data, or set it to {off}."
        )
    return function


def uniform_groups(batch: GradedBatch) -> Tensor:
    """``[K]`` bool on the CPU: groups whose rows are all right or all wrong, in the order of the rows."""
    if not len(batch):
        return torch.zeros(0, dtype=torch.bool)
    correct = batch.correct.cpu().reshape(len(torch.unique(batch.group)), -1)
    return correct.all(1) | ~correct.any(1)


def _replace(batch: GradedBatch, fresh: GradedBatch) -> GradedBatch:
    """Replace dead groups by the first of the fresh live groups, which take over their row and group numbers."""
    places = uniform_groups(batch).nonzero().flatten()
    useful = (~uniform_groups(fresh)).nonzero().flatten()[: len(places)]
    places = places[: len(useful)]
    if not len(places):
        return batch
    size = len(batch) // len(uniform_groups(batch))
    within, order = torch.arange(size), torch.arange(len(batch))
    old = (places[:, None] * size + within).flatten()
    new = (useful[:, None] * size + within).flatten()
    order[old] = len(batch) + torch.arange(len(old))
    joined = join(batch, fresh.select(new)).select(order)
    return joined.replace(group=batch.group, row=batch.row)

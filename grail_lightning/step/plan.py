"""The rows that each optimiser step of a batch trains on. Pure functions: nothing is run here.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch, SampledBatch
from grail_lightning.credit.base import TokenWeights
from grail_lightning.runtime.collectives import all_reduce
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.options import Execution, Objective


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The optimiser steps of a batch.

    Attributes:
        mask: ``[B, T]`` bool, the tokens in the loss.
        live: ``[B]`` bool on the CPU, the rows that can contribute a gradient. Other rows are counted, but not run.
        steps: The rows of each optimiser step, long on the CPU.
        max_response_length: The limit in tokens, a denominator of Dr. GRPO.
    """

    mask: Tensor
    live: Tensor
    steps: list[Tensor]
    max_response_length: int

    def run_in(self, index: int) -> Tensor:
        """The live rows of an optimiser step. Only they are run; the denominators of the loss count all of its rows."""
        rows = self.steps[index]
        return rows[self.live[rows]]


def plan_steps(
    batch: RolloutBatch,
    objective: Objective,
    execution: Execution,
    *,
    max_response_length: int,
    weights: TokenWeights,
    refreshed: bool = False,
    seed: int,
) -> Plan:
    """Cut a batch into optimiser steps, equally many on every rank.

    If no rank has a live row, there is one step without rows. It changes no weight, but counts towards `max_steps`, so
    that a run without a learning signal ends.

    Rows with an additive term that is not 0 are trained on without an advantage, too; weights that are `refreshed`
    before each further step may add to any row later. `seed` is that of the order of groups.
    """
    mask = loss_mask(batch, objective)
    live = live_rows(batch, mask, everything=objective.trains_all_rows)
    if weights.additive is not None:
        live = live | (mask.any(1) & ((weights.additive != 0).any(1) | refreshed))
    steps: list[Tensor] = []
    if all_reduce(live.sum(), "sum"):
        for number in range(execution.updates_per_batch):
            generator = torch.Generator().manual_seed(derive_seed(seed, number))
            steps += split_groups(batch, execution.mini_batches, generator)
    nothing = [torch.zeros(0, dtype=torch.long)]
    return Plan(mask=mask, live=live.cpu(), steps=steps or nothing, max_response_length=max_response_length)


def loss_mask(batch: SampledBatch, objective: Objective) -> Tensor:
    """``[B, T]`` bool: the tokens in the loss, for numerator and denominator alike."""
    return batch.response_mask & batch.finished[:, None] if objective.mask_truncated else batch.response_mask


def live_rows(batch: RolloutBatch, mask: Tensor, *, everything: bool) -> Tensor:
    """``[B]`` bool: rows with a token in the loss that have an advantage; with `everything`, also those without."""
    return mask.any(1) & ((batch.advantages != 0) | everything)


def split_groups(batch: SampledBatch, mini_batches: int, generator: torch.Generator) -> list[Tensor]:
    """The rows of each mini-batch of one pass: whole groups, in random order if there is more than one mini-batch.

    If a batch has fewer groups than mini-batches (as the last batch may), the mini-batches at the end are empty.
    """
    group = batch.group.cpu()
    groups = torch.unique(group)
    if mini_batches > 1:
        groups = groups[torch.randperm(len(groups), generator=generator)]
    # `tensor_split` accepts any number of parts; `chunk` may return fewer.
    return [torch.isin(group, part).nonzero().flatten() for part in torch.tensor_split(groups, mini_batches)]

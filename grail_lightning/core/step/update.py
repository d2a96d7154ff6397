"""The optimiser steps of one batch: one forward pass, one loss and one backward pass for each micro-batch.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grail_lightning.core.credit.base import TokenWeights, token_advantages
from grail_lightning.core.credit.service import FrozenReference
from grail_lightning.core.functional.advantages import group_sums
from grail_lightning.core.functional.policy_gradient import sampler_correction
from grail_lightning.core.functional.tokens import TokenStats
from grail_lightning.core.objective import Objective
from grail_lightning.core.policy.capabilities import has_dropout
from grail_lightning.core.policy.layout import to_device
from grail_lightning.core.policy.micro_batch import MicroBatch, scatter, zero_table
from grail_lightning.core.rollout.batch import GradedBatch
from grail_lightning.core.runtime.collectives import all_gather_rows, all_reduce, world_size
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.execution import Execution
from grail_lightning.core.step.figures import LossSums
from grail_lightning.core.step.forward import Forward, reference_logprobs
from grail_lightning.core.step.loss import LossInputs, count_denominators, live_rows, loss_mask, micro_batch_loss


def split_rows(batch: GradedBatch, execution: Execution, generator: torch.Generator) -> list[Tensor]:
    """The rows of each mini-batch of one iteration, each row in one of them; in random order if there are several.

    Each has whole groups of this rank, in numbers that differ by at most one; if a batch has fewer groups than
    mini-batches (as the last batch may), the mini-batches at the end are empty, and their optimiser steps are taken all
    the same. With `execution.split_groups` the single rows of all ranks are split instead, by their numbers in the
    training step: the outcome is the same for any number of ranks, as long as `generator` is. Each rank still runs its
    own rows, whose number may then differ between its mini-batches. Rows without a reward are in none.
    """
    if execution.split_groups:
        keys, units = batch.row.cpu(), all_gather_rows(batch.row[batch.scored]).cpu().sort().values
    else:
        keys, units = batch.group.cpu(), torch.unique(batch.group[batch.scored].cpu())
    if execution.mini_batches > 1:
        units = units[torch.randperm(len(units), generator=generator)]
    # `tensor_split` accepts any number of parts; `chunk` may return fewer.
    return [torch.isin(keys, part).nonzero().flatten() for part in torch.tensor_split(units, execution.mini_batches)]


class _OldLogprobs:
    """Old log-probabilities of each row, by one of three rules.

    *Same weights*: in the first optimiser step the policy still has its old weights. The log-probabilities of the pass
    itself, detached, are the old ones, and the ratio is 1. A batch with one optimiser step needs no other rule, and
    what it records is not read.

    *Recorded*: rows that the first step has run have their log-probabilities recorded for later steps.

    *Computed before*: rows that the first step does not run need their old log-probabilities before it changes the
    weights. With dropout and several steps these are all rows: the first step has dropout, but the sampler had none.
    """

    def __init__(self, live: Tensor, first_step: Tensor, table: Tensor, *, dropout: bool) -> None:
        self._live, self._first_step, self._dropout = live, first_step, dropout
        self._values = table  # [B, T]
        self._known = torch.zeros(len(table), dtype=torch.bool)

    def rows_before(self) -> Tensor:
        """``[n]`` long: the rows whose log-probabilities have to be computed before the first of several steps."""
        rows = self._live.clone()
        if not self._dropout:
            rows[self._first_step] = False
        return rows.nonzero().flatten()

    def of(self, micro: MicroBatch, logprobs: Tensor) -> Tensor:
        """``[b, t]``: the old log-probabilities of a micro-batch, given its present ones."""
        if not self._are_known(micro):
            return logprobs.detach()
        return self._values[to_device(micro.rows, self._values.device), : logprobs.shape[1]]

    def record(self, micro: MicroBatch, logprobs: Tensor) -> None:
        """Store the log-probabilities of rows that are run for the first time, for later steps."""
        if not self._are_known(micro):
            scatter(self._values, micro.rows, logprobs)
            self._known[micro.rows] = True

    def _are_known(self, micro: MicroBatch) -> bool:
        flags = self._known[micro.rows]
        # Micro-batches are cut from the rows of one optimiser step, and all rows of later steps are known before.
        assert flags.all() or not flags.any(), "a micro-batch falls under one rule"
        return bool(flags.all())


def without_lone_rows(weights: TokenWeights, batch: GradedBatch) -> TokenWeights:
    """The weights, whose additive stage is 0 on a row that is the only one of its group with a reward.

    Most methods, GRAIL and `Uniform` among them, have no additive stage.
    """
    if weights.additive is None:
        return weights
    scored, _ = group_sums(batch.scored.double(), batch.group)
    return replace(weights, additive=weights.additive.masked_fill((scored < 2)[:, None], 0))


class Update:
    """Accumulates the gradients of each optimiser step of a batch.

    With the default options there is one step and its ratio is 1: no pass precedes it, old log-probabilities are those
    of the step's own pass. With credit `Uniform` no token weights are replaced.

    Every rank calls every collective the same number of times. Ranks agree on the numbers of optimiser steps and
    micro-batches, and a rank with fewer micro-batches runs a row whose loss is multiplied by 0.

    `seed` is that of the order of groups, or of rows, `sampler_cap` the bound of weights that correct for a sampler
    that differs from the trainer (None is off). With `refreshes` the caller replaces the token weights before each
    further step (`set_token_weights`).

    Attributes:
        mask: ``[B, T]`` bool, the tokens in the loss.
        live: ``[B]`` bool on the CPU, the rows that can contribute a gradient, which are run. Rows that have a token in
            the loss, but an advantage of 0, are not run and count in the denominators. Truncated rows that the
            objective leaves out are not run and do not count.
        steps: The rows of each optimiser step, long on the CPU; equally many steps on every rank. If no rank has a live
            row, there is one step without rows. It changes no weight, but counts towards `max_steps`, so that a run
            without a learning signal ends.
        ref_logprobs: ``[B, T]``, under the frozen reference; None before `compute_before_steps` and without a KL term.
        token_advantages: ``[B, T]``, with the weights that are known so far.
    """

    def __init__(
        self,
        forward: Forward,
        token_weights: TokenWeights,
        *,
        objective: Objective,
        execution: Execution,
        max_response_length: int,
        seed: int,
        sampler_cap: float | None = None,
        refreshes: bool = False,
    ) -> None:
        self.forward, self.batch, self.max_response_length = forward, forward.batch, max_response_length
        self.objective, self.execution, self.sampler_cap, self.refreshes = objective, execution, sampler_cap, refreshes
        self.mask = loss_mask(self.batch, objective)
        self.set_token_weights(token_weights)
        added, every = self._given_weights.additive, objective.trains_all_rows
        live = live_rows(self.batch, self.mask, added, all_rows=every, refreshes=refreshes)
        self.live = live.cpu()
        self.steps: list[Tensor] = []
        if all_reduce(live.sum(), "sum"):
            for number in range(execution.num_iterations):
                generator = torch.Generator().manual_seed(derive_seed(seed, number))
                self.steps += split_rows(self.batch, execution, generator)
        self.steps = self.steps or [torch.zeros(0, dtype=torch.long)]
        self.ref_logprobs: Tensor | None = None
        policy = forward.policy
        dropout = policy.training and has_dropout(policy)
        table = zero_table(policy, self.batch)
        self.old_logprobs = _OldLogprobs(self.live, self.steps[0], table, dropout=dropout)

    def set_token_weights(self, token_weights: TokenWeights) -> None:
        """Use these token weights in the following steps."""
        self._given_weights = without_lone_rows(token_weights, self.batch)
        self.token_advantages = token_advantages(self.batch.advantages, self._given_weights)

    def final_weights(self) -> TokenWeights:
        """The token weights that the last step has used: those of fused saliency, else the ones given last."""
        fused = self.forward.weights_so_far()
        return self._given_weights if fused is None else fused

    def compute_before_steps(self) -> None:
        """Compute log-probabilities under the reference, with a KL term, and old ones, with several optimiser steps.

        The old ones are those of rows that the first step does not run. With one optimiser step and no KL term, the
        default, there is nothing to compute.
        """
        if self.objective.kl_coefficient:
            reference = self.forward.context.service(FrozenReference)
            self.ref_logprobs = reference_logprobs(reference, self.forward, self.live.nonzero().flatten())
        if len(self.steps) == 1:  # All ranks have equally many steps, so all or none go on to the passes.
            return
        for micro, logprobs, weights in self.forward.without_gradient(self.old_logprobs.rows_before()):
            self._use_token_weights(micro, weights)
            self.old_logprobs.record(micro, logprobs)

    def accumulate(self, index: int, backward: Callable[[Tensor, bool], None], *, in_place: bool = False) -> LossSums:
        """Run the forward and backward passes of an optimiser step; returns sums for its figures.

        With a policy on CUDA the host does not wait for the device from the first forward pass on, so that the passes
        follow each other without a gap.

        `backward(loss, last)` gets the loss of each micro-batch times the number of ranks, and whether it is the last
        one of this step, with which DDP reduces gradients over ranks (FSDP2 does so with each, unless
        `Loading.reduce_once` is set). `in_place`: whether the backward pass may add the head's gradient to
        `weight.grad` in place.
        """
        rows = self.steps[index]
        denominators = count_denominators(self.mask, rows, self.max_response_length)
        rows = rows[self.live[rows]]
        sums, tokens_run = self._run_passes(self.forward.cut(rows), denominators, backward, in_place)
        # The last token of a row predicts nothing and is not run.
        without_sharing = int(self.forward.on_cpu.lengths[rows].sum()) - len(rows)
        return LossSums(sums, tokens_run, without_sharing)

    def _run_passes(
        self,
        parts: list[MicroBatch],
        denominators: dict[str, int],
        backward: Callable[[Tensor, bool], None],
        in_place: bool,
    ) -> tuple[dict[str, Tensor], int]:
        """The sums over the micro-batches of a step, and the number of tokens that were run."""
        tokens_run = 0
        sums: dict[str, Tensor] = {}
        for number, micro in enumerate(parts, start=1):
            result = self.forward(micro, in_place=in_place)
            if micro.is_dummy:  # It keeps ranks at equally many passes.
                loss = result.stats.logprobs.sum() * 0
            else:
                self._use_token_weights(micro, result.weights)
                loss, summands = micro_batch_loss(self._inputs(micro, result.stats), self.objective, denominators)
                self.old_logprobs.record(micro, result.stats.logprobs)
                tokens_run += result.tokens_run
                sums = {name: sums[name] + value if name in sums else value for name, value in summands.items()}
            # Strategies average gradients over ranks, but the denominators already include all ranks.
            backward(loss * world_size(), number == len(parts))
        return sums, tokens_run

    def _use_token_weights(self, micro: MicroBatch, weights: TokenWeights | None) -> None:
        if weights is not None:  # With fused saliency alone.
            advantages = self.batch.advantages[to_device(micro.rows, self.batch.advantages.device)]
            scatter(self.token_advantages, micro.rows, token_advantages(advantages, weights))

    def _inputs(self, micro: MicroBatch, stats: TokenStats) -> LossInputs:
        rows, columns = to_device(micro.rows, self.mask.device), stats.logprobs.shape[1]

        def rows_of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows, :columns]

        cap = self.sampler_cap
        old, sampled = self.old_logprobs.of(micro, stats.logprobs), rows_of(self.batch.sampling_logprobs)
        assert cap is None or sampled is not None, "`Sampler.generate` refuses such an engine"
        return LossInputs(
            stats=stats,
            old_logprobs=old,
            token_advantages=self.token_advantages[rows, :columns],
            mask=self.mask[rows, :columns],
            ref_logprobs=rows_of(self.ref_logprobs),
            sampling_logprobs=sampled,
            companion=self.forward.companion,
            row_advantages=self.batch.advantages[rows],
            sampler_correction=None if cap is None or sampled is None else sampler_correction(old, sampled, cap),
        )

"""The optimiser steps of one batch: one forward pass, one loss and one backward pass for each micro-batch.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.credit.base import TokenWeights
from grail_lightning.functional.policy_gradient import sampler_correction
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.policy import Policy
from grail_lightning.policy.capabilities import has_dropout
from grail_lightning.policy.micro_batch import MicroBatch, scatter
from grail_lightning.policy.reference import Reference
from grail_lightning.runtime.collectives import world_size
from grail_lightning.step.advantages import token_advantages
from grail_lightning.step.forward import Forward, Pass, reference_logprobs
from grail_lightning.step.loss import LossInputs, count_denominators, micro_batch_loss
from grail_lightning.step.options import Execution, Objective
from grail_lightning.step.plan import Plan, plan_steps
from grail_lightning.step.report import step_means

Backward = Callable[[Tensor, bool], None]
"""``backward(loss, last)``: the loss of a micro-batch times the number of ranks, and whether it is the last one of the
step, with which DDP reduces gradients over ranks. FSDP2 does so with each, unless `Loading.reduce_once` is set."""


class OldLogprobs:
    """Old log-probabilities of each row, by one of three rules.

    *Same weights*: in the first optimiser step the policy still has its old weights. The log-probabilities of the pass
    itself, detached, are the old ones, and the ratio is 1. A batch with one optimiser step needs no other rule.

    *Recorded*: rows that the first step has scored have their log-probabilities recorded for later passes.

    *Computed before*: rows of later steps need their old log-probabilities before the first step changes the weights.
    With dropout and several steps this holds for all rows: the first step has dropout, but the sampler had none.

    Args:
        plan: The optimiser steps.
        policy: The policy that is trained.
    """

    def __init__(self, plan: Plan, policy: Policy) -> None:
        dtype = torch.promote_types(policy.model.dtype, torch.float32)
        self._values = torch.zeros(plan.mask.shape, dtype=dtype, device=plan.mask.device)
        self._known = torch.zeros(len(plan.mask), dtype=torch.bool)
        self._plan, self._dropout = plan, policy.training and has_dropout(policy)

    def rows_before(self) -> Tensor:
        """``[n]`` long: the rows whose log-probabilities have to be computed before the first of several steps."""
        live = self._plan.live.clone()
        if not self._dropout:
            live[self._plan.steps[0]] = False
        return live.nonzero().flatten()

    def of(self, micro: MicroBatch, stats: TokenStats) -> Tensor:
        """``[b, t]``: the old log-probabilities of a micro-batch, given its present ones (`stats`)."""
        if not self._are_known(micro):
            return stats.logprobs.detach()
        return self._values[micro.rows.to(self._values.device), : stats.logprobs.shape[1]]

    def record(self, micro: MicroBatch, stats: TokenStats) -> None:
        """Store the log-probabilities of rows that are scored for the first time, for later steps."""
        if not self._are_known(micro):
            scatter(self._values, micro.rows, stats.logprobs)
            self._known[micro.rows] = True

    def _are_known(self, micro: MicroBatch) -> bool:
        known = self._known[micro.rows]
        assert known.all() or not known.any(), "a micro-batch falls under one rule"
        return bool(known.all())


class Update:
    """Accumulates the gradients of each optimiser step of a batch.

    Every rank calls every collective the same number of times. Ranks agree on the numbers of optimiser steps and
    micro-batches, and a rank with fewer micro-batches runs a row that counts nothing.

    Args:
        forward: The forward pass of micro-batches.
        weights: The token weights; those of rows whose first pass returns weights are replaced then.
        plan: The optimiser steps.
        objective: What is optimised.
        execution: How it is run.
        ref_logprobs: ``[B, T]``, under the frozen reference; None without a KL term.
        refreshed: Whether the token weights are replaced before each further step.

    Attributes:
        token_advantages: ``[B, T]``, with the weights that are known so far.
        entropies: ``[B, T]`` in nats, from the first forward pass with gradient of each row; zero on rows without one.
    """

    def __init__(
        self,
        forward: Forward,
        weights: TokenWeights,
        plan: Plan,
        objective: Objective,
        execution: Execution,
        ref_logprobs: Tensor | None = None,
        refreshed: bool = False,
    ) -> None:
        self.forward, self.batch, self.plan, self.ref_logprobs = forward, forward.batch, plan, ref_logprobs
        self.objective, self.execution, self.refreshed = objective, execution, refreshed
        self.old_logprobs = OldLogprobs(plan, forward.policy)
        self.reweigh(weights)
        self.entropies = torch.zeros_like(self.token_advantages, dtype=torch.float32)
        self._has_entropy = torch.zeros(len(self.batch), dtype=torch.bool)

    def reweigh(self, weights: TokenWeights) -> None:
        """Use these token weights in the following steps."""
        self._weights = weights
        self.token_advantages = token_advantages(self.batch.advantages, weights)

    def token_weights(self) -> TokenWeights:
        """The token weights of the batch: those that were known before the passes, or that passes have returned."""
        weights = self.forward.found_weights()
        return self._weights if weights is None else weights

    def compute_before(self) -> None:
        """Compute the old log-probabilities that need the policy's weights from before the first of several steps."""
        for micro, done in self.forward.without_gradient(self.old_logprobs.rows_before()):
            self._take_weights(micro, done)
            self.old_logprobs.record(micro, done.stats)

    def accumulate(self, index: int, backward: Backward, *, in_place: bool = False) -> dict[str, float]:
        """Forward and backward passes of a step of the plan: the loss, and means over its tokens, over all ranks.

        `in_place`: whether the backward pass may add the head's gradient to `weight.grad` in place.
        """
        counts, rows = count_denominators(self.plan, index), self.plan.run_in(index)
        parts, tokens_run = self.forward.cut(rows), 0
        sums: dict[str, Tensor] = {}
        for number, micro in enumerate(parts, start=1):
            done = self.forward(micro, in_place=in_place)
            if micro.stands_in:
                loss = done.stats.logprobs.sum() * 0
            else:
                self._take_weights(micro, done)
                loss, summands = micro_batch_loss(self._inputs(micro, done.stats), self.objective, counts)
                self._record(micro, done.stats)
                tokens_run += done.tokens_run
                sums = {name: sums[name] + value if name in sums else value for name, value in summands.items()}
            # Strategies average gradients over ranks, but the denominators already include all ranks.
            backward(loss * world_size(), number == len(parts))
        # The last token of a row predicts nothing and is not run.
        asked = int(self.batch.lengths.cpu()[rows].sum()) - len(rows)
        return step_means(sums, run=tokens_run, asked=asked)

    def _take_weights(self, micro: MicroBatch, done: Pass) -> None:
        """Use the token weights that a pass has found."""
        if done.weights is not None:
            advantages = self.batch.advantages[micro.rows.to(self.batch.advantages.device)]
            scatter(self.token_advantages, micro.rows, token_advantages(advantages, done.weights))

    def _record(self, micro: MicroBatch, stats: TokenStats) -> None:
        self.old_logprobs.record(micro, stats)
        if stats.entropy is not None and not self._has_entropy[micro.rows].all():
            scatter(self.entropies, micro.rows, stats.entropy)
            self._has_entropy[micro.rows] = True

    def _inputs(self, micro: MicroBatch, stats: TokenStats) -> LossInputs:
        rows, columns = micro.rows.to(self.plan.mask.device), stats.logprobs.shape[1]

        def rows_of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows, :columns]

        old, sampled = self.old_logprobs.of(micro, stats), rows_of(self.batch.sampling_logprobs)
        cap = self.execution.decided_cap
        assert cap is None or sampled is not None, "`Sampler.draw` refuses such an engine"
        return LossInputs(
            stats=stats,
            old_logprobs=old,
            advantages=self.token_advantages[rows, :columns],
            mask=self.plan.mask[rows, :columns],
            ref_logprobs=rows_of(self.ref_logprobs),
            sampling_logprobs=sampled,
            distillation_strength=self._distillation_strength(rows),
            sampler_weights=None if cap is None or sampled is None else sampler_correction(old, sampled, cap),
        )

    def _distillation_strength(self, rows: Tensor) -> Tensor | None:
        """``[b, 1]``: β of each row; None without a teacher."""
        options, forward = self.objective.distillation, self.forward
        if options is None or forward.teacher is None:
            return None
        advantages = self.batch.advantages[rows, None]
        taught = advantages > 0 if options.only_positive else torch.ones_like(advantages, dtype=torch.bool)
        return options.strength(forward.context.step) * taught


def prepare(
    forward: Forward,
    weights: TokenWeights,
    objective: Objective,
    execution: Execution,
    reference: Reference | None,
    *,
    limit: int,
    seed: int,
    refreshed: bool = False,
) -> Update:
    """Plan the optimiser steps of a batch; compute log-probabilities that need the weights from before the first one.

    `limit` is that of a response in tokens, `seed` that of the order of groups; for the others see `Update`.
    """
    batch = forward.batch
    plan = plan_steps(
        batch, objective, execution, max_response_length=limit, weights=weights, refreshed=refreshed, seed=seed
    )
    ref_logprobs = None
    if reference is not None and objective.kl_coefficient:
        rows, share = plan.live.nonzero().flatten(), execution.share_prefixes
        ref_logprobs = reference_logprobs(reference, forward.policy, batch, rows, forward.context, share=share)
    update = Update(forward, weights, plan, objective, execution, ref_logprobs, refreshed)
    if len(plan.steps) > 1:  # On every rank alike: the passes are collectives.
        update.compute_before()
    return update

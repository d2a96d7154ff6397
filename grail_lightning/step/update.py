"""The optimiser steps of one batch: one forward pass, one loss and one backward pass for each micro-batch.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.credit.base import TokenWeights
from grail_lightning.functional.policy_gradient import sampler_correction
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.policy.micro_batch import MicroBatch
from grail_lightning.policy.reference import Reference
from grail_lightning.runtime.collectives import world_size
from grail_lightning.step.forward import Forward
from grail_lightning.step.loss import LossInputs, count_denominators, micro_batch_loss
from grail_lightning.step.old_logprobs import OldLogprobs
from grail_lightning.step.options import Execution, Objective
from grail_lightning.step.plan import Plan, plan_steps
from grail_lightning.step.reference import reference_logprobs
from grail_lightning.step.report import step_means

Backward = Callable[[Tensor, bool], None]
"""``backward(loss, last)``: the loss of a micro-batch times the number of ranks, and whether it is the last one of the
step, with which DDP reduces gradients over ranks. FSDP2 does so with each, unless `Loading.reduce_once` is set."""


class Update:
    """Accumulates the gradients of each optimiser step of a batch.

    Every rank calls every collective the same number of times. Ranks agree on the numbers of optimiser steps and
    micro-batches, and a rank with fewer micro-batches runs a row that counts nothing.

    Args:
        forward: The forward pass of micro-batches, with the token weights.
        plan: The optimiser steps.
        objective: What is optimised.
        execution: How it is run.
        ref_logprobs: ``[B, T]``, under the frozen reference; None without a KL term.
    """

    def __init__(
        self,
        forward: Forward,
        plan: Plan,
        objective: Objective,
        execution: Execution,
        ref_logprobs: Tensor | None = None,
    ) -> None:
        self.forward, self.plan, self.ref_logprobs = forward, plan, ref_logprobs
        self.objective, self.execution = objective, execution
        self.old_logprobs = OldLogprobs(plan, forward.policy)

    def reweigh(self, weights: TokenWeights) -> None:
        """Replace the token weights for the following steps."""
        self.forward = self.forward.reweighed(weights)

    def accumulate(self, index: int, backward: Backward, *, in_place: bool = False) -> dict[str, float]:
        """Forward and backward passes of one optimiser step.

        Args:
            index: The index of the step in the plan.
            backward: The backward pass of a micro-batch.
            in_place: Whether the backward pass may add the head's gradient to `weight.grad` in place.

        Returns:
            The loss, and means over its tokens, over all ranks.
        """
        counts, rows = count_denominators(self.plan, index), self.plan.run_in(index)
        parts, begun = self.forward.cut(rows), self.forward.tokens_run
        sums: dict[str, Tensor] = {}
        for number, micro in enumerate(parts, start=1):
            stats = self.forward(micro, in_place=in_place)  # May set `token_advantages`, which the loss reads.
            if micro.stands_in:
                loss = stats.logprobs.sum() * 0
            else:
                loss, found = micro_batch_loss(self._inputs(micro, stats), self.objective, counts)
                self.old_logprobs.record(micro, stats)
                sums = {name: sums[name] + value if name in sums else value for name, value in found.items()}
            # Strategies average gradients over ranks, but the denominators already include all ranks.
            backward(loss * world_size(), number == len(parts))
        # The last token of a row predicts nothing and is not run.
        asked = int(self.forward.batch.lengths.cpu()[rows].sum()) - len(rows)
        return step_means(sums, run=self.forward.tokens_run - begun, asked=asked)

    def _inputs(self, micro: MicroBatch, stats: TokenStats) -> LossInputs:
        rows, columns = micro.rows.to(self.plan.mask.device), stats.logprobs.shape[1]

        def rows_of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows, :columns]

        old, sampled = self.old_logprobs.of(micro, stats), rows_of(self.forward.batch.sampling_logprobs)
        cap = self.execution.decided_cap
        assert cap is None or sampled is not None, "`Sampler.draw` refuses such an engine"
        return LossInputs(
            stats=stats,
            old_logprobs=old,
            advantages=self.forward.token_advantages[rows, :columns],
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
        advantages = forward.batch.advantages[rows, None]
        taught = advantages > 0 if options.only_positive else torch.ones_like(advantages, dtype=torch.bool)
        return options.strength(forward.context.step) * taught


def prepare(
    forward: Forward,
    objective: Objective,
    execution: Execution,
    reference: Reference | None,
    *,
    limit: int,
    seed: int,
) -> Update:
    """Plan the optimiser steps of a batch; compute log-probabilities that need the weights from before the first one.

    Args:
        forward: The forward pass of the batch, with its token weights.
        objective: What is optimised.
        execution: How it is run.
        reference: The frozen reference; None if nothing is compared with it.
        limit: The limit of a response in tokens.
        seed: The seed of the order of groups.
    """
    batch, additive = forward.batch, forward.additive_rows
    plan = plan_steps(batch, objective, execution, max_response_length=limit, additive_rows=additive, seed=seed)
    ref_logprobs = None
    if reference is not None and objective.kl_coefficient:
        rows, share = plan.live.nonzero().flatten(), execution.share_prefixes
        ref_logprobs = reference_logprobs(reference, forward.policy, batch, rows, forward.context, share=share)
    update = Update(forward, plan, objective, execution, ref_logprobs)
    if len(plan.steps) > 1:  # On every rank alike: the passes are collectives.
        rows = update.old_logprobs.rows_before()
        update.old_logprobs.computed_before(rows, forward.logprobs_without_gradient(rows))
    return update

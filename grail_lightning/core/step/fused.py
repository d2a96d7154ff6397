"""Saliency from the update's first forward pass of each row, and from it the row's token weights.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grail_lightning.core.credit.base import CreditContext, CreditControl, TokenCredit, TokenWeights, check_weights
from grail_lightning.core.credit.saliency import SaliencyCredit, forward_with_saliency, saliency_of_rows
from grail_lightning.core.distributed.sharding import gathered
from grail_lightning.core.objective import Companion, Objective
from grail_lightning.core.policy.capabilities import has_dropout
from grail_lightning.core.policy.layout import to_device
from grail_lightning.core.policy.micro_batch import MicroBatch, cut_rows, dummy_micro_batch, scatter
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.collectives import all_reduce, pad_to_longest_rank
from grail_lightning.core.step.forward import Forward, PassResult


def method_to_fuse(
    credit: TokenCredit,
    control: CreditControl | None,
    objective: Objective,
    companion: Companion | None,
    policy: Policy,
) -> SaliencyCredit | None:
    """The method whose saliency the update's first forward passes provide; None if it has a pass of its own.

    This is the one list of when saliency is fused. With GRAIL's defaults it is. It is not fused where the result would
    differ from that of a separate pass:

    - for a method that is no function of saliency, or that does not fuse (`TokenCredit.fuses`), as with
      `saliency.fuse` off;
    - with `refresh: step`, since the weights are then computed before every optimiser step;
    - with a control, which may need all weights at once;
    - with an entropy bonus or a companion, whose gradients the fused pass does not have;
    - with dropout, which saliency excludes.
    """
    once = credit.refresh == "batch" and control is None
    plain = objective.entropy_coefficient == 0 and companion is None and not has_dropout(policy)
    return credit if once and plain and credit.fuses and isinstance(credit, SaliencyCredit) else None


class SaliencyForward(Forward):
    """A `Forward` whose first pass of a row that needs saliency also returns the row's token weights.

    Two backward passes follow such a pass: one to the leaf, for saliency, and one to the weights. Checkpointed
    blocks are recomputed in both, and sharded blocks (FSDP2) gathered in both; only the second one reduces gradients.

    In a prefix tree, rows that need saliency share their prompt alone, without its last token. A shared response token
    would otherwise need a saliency for each response.

    The saliency of sharded blocks gathers them once more, which is a collective. There every rank has equally many
    micro-batches with saliency: a rank with fewer fills in with a row whose saliency is not used.

    `live` ``[B]`` are the rows that the update runs. The saliency of other rows, such as truncated ones, is computed at
    once, for figures and pictures; the constructor is therefore a collective. The clock counts saliency as its phase
    ``credit``.
    """

    def __init__(
        self,
        policy: Policy,
        batch: RolloutBatch,
        context: CreditContext,
        credit: SaliencyCredit,
        live: Tensor,
        clock: PhaseClock,
        *,
        share_prefixes: bool = True,
    ) -> None:
        super().__init__(policy, batch, context, share_prefixes=share_prefixes)
        self.credit, self.clock = credit, clock
        self.target = credit.target(policy, batch)
        # Rows whose first pass, with their saliency, is still to come.
        self.pending = (self.target.rows & live).cpu()
        self._dummy = dummy_micro_batch(self.on_cpu) if isinstance(policy, FSDPModule) else None
        others = replace(self.target, rows=self.target.rows & ~live)
        there_are_some = bool(all_reduce(others.rows.sum(), "sum"))
        with gathered(policy) if there_are_some else nullcontext():
            self._scores = saliency_of_rows(policy, batch, others, context)

    def weights_so_far(self) -> TokenWeights:
        """The token weights of the batch, from the saliency that has been computed so far.

        Rows whose first pass has not run yet have provisional ones, those of a saliency of 0 at every token.
        """
        return self.credit.weights_from(self._scores, self.policy, self.batch, self.context)

    def __call__(self, micro: MicroBatch, *, in_place: bool = False) -> PassResult:
        """See `Forward`; the first pass of rows also returns their token weights."""
        if not self._needs_saliency(micro):
            return super().__call__(micro, in_place=in_place)
        return self._with_saliency(micro, in_place=in_place)

    def _frozen_pass(self, micro: MicroBatch) -> tuple[Tensor, TokenWeights | None]:
        if not self._needs_saliency(micro):
            return super()._frozen_pass(micro)
        result = self._with_saliency(micro, frozen=True)
        return result.stats.logprobs, result.weights

    def _needs_saliency(self, micro: MicroBatch) -> bool:
        return micro is self._dummy or (not micro.is_dummy and bool(self.pending[micro.rows].all()))

    def _with_saliency(self, micro: MicroBatch, *, frozen: bool = False, in_place: bool = False) -> PassResult:
        piece = self.batch.select(micro.rows)
        layout = self.policy.layout(self.on_cpu.select(micro.rows), micro.starts, share_responses=False)
        rows, columns = to_device(micro.rows, self._scores.device), piece.response_mask.shape[1]
        stats, saliency = forward_with_saliency(
            self.policy,
            layout,
            replace(self.target, explained=self.target.explained[rows, :columns]),
            temperature=self.context.temperature,
            frozen=frozen,
            in_place=in_place,
        )
        with self.clock.phase("credit"), torch.no_grad():
            scores = saliency()
            if micro.is_dummy:
                return PassResult(stats, layout.num_tokens)
            scatter(self._scores, micro.rows, scores)
            weights = self.credit.weights_from(scores, self.policy, piece, self.context)
            check_weights(self.credit, weights, piece)
            assert weights.additive is None, "`SaliencyCredit.weights_from` has no additive stage"
        self.pending[micro.rows] = False
        return PassResult(stats, layout.num_tokens, weights)

    def _cut(self, rows: Tensor) -> list[MicroBatch]:
        """Micro-batches in which rows that still need saliency come first, separate from the others."""
        pending = self.pending[rows]
        mine, budget = rows[pending], self.context.token_budget
        first = cut_rows(self.policy, self.on_cpu, mine, budget, share=self.share_prefixes, share_responses=False)
        if self._dummy is not None:
            first = pad_to_longest_rank(first, self._dummy, self.batch.response_mask.device)
        return first + super()._cut(rows[~pending])

"""Forward passes of an update: a micro-batch in, log-probabilities and token advantages out.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, TokenWeights
from grail_lightning.credit.saliency import SaliencyCredit, forward_with_saliency, saliency_of_rows
from grail_lightning.credit.weigh import check_weights
from grail_lightning.distributed.sharding import gathered
from grail_lightning.functional.tokens import TokenStats
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import TokenLayout
from grail_lightning.policy.micro_batch import MicroBatch, cut_rows, scatter, stand_in
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.runtime.collectives import all_reduce, pad_to_longest_rank
from grail_lightning.step.advantages import token_advantages
from grail_lightning.step.distillation import Teacher


class Forward:
    """The rows of an update with their token advantages, and the forward pass of their micro-batches.

    Args:
        policy: The policy that is run.
        batch: The rollouts, ``B`` rows.
        context: The context, with token budget and temperature.
        weights: Their token weights.
        share: Whether common beginnings of rows are run once.
        entropy_gradient: Whether the entropy carries a gradient.
        refreshed: Whether the weights are replaced before each further optimiser step.
        teacher: The teacher from which the divergence is measured in passes with gradient; None without one.

    Attributes:
        token_advantages: ``[B, T]``, weights included.
        entropies: ``[B, T]`` in nats, from the first forward pass with gradient of each row; zero on rows without one.
        tokens_run: The number of tokens that all passes have run.
    """

    def __init__(
        self,
        policy: Policy,
        batch: RolloutBatch,
        context: CreditContext,
        weights: TokenWeights,
        *,
        share: bool = True,
        entropy_gradient: bool = False,
        refreshed: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        self.policy, self.batch, self.context = policy, batch, context
        self.share, self.entropy_gradient, self.refreshed = share, entropy_gradient, refreshed
        self.teacher = teacher
        self.token_advantages = token_advantages(batch.advantages, weights)
        self.entropies = torch.zeros_like(self.token_advantages, dtype=torch.float32)
        self.tokens_run = 0
        self._weights, self._scored = weights, torch.zeros(len(self.batch), dtype=torch.bool)

    @property
    def additive_rows(self) -> Tensor | None:
        """``[B]`` bool: rows that have a gradient through the additive stage of credit, also without an advantage.

        Weights that are refreshed before each step may add to any row later. None without an additive stage.
        """
        if self._weights.additive is None:
            return None
        return (self._weights.additive != 0).any(1) | self.refreshed

    def token_weights(self) -> TokenWeights:
        """The token weights that are known so far."""
        return self._weights

    def reweighed(self, weights: TokenWeights) -> Forward:
        """A forward pass of the same rows with other token weights, for credit that is refreshed before each step."""
        made = copy.copy(self)
        made._weights, made.token_advantages = weights, token_advantages(self.batch.advantages, weights)
        return made

    def cut(self, rows: Tensor) -> list[MicroBatch]:
        """The rows as micro-batches, equally many on each rank."""
        return pad_to_longest_rank(self._cut(rows), stand_in(self.batch), self.batch.response_mask.device)

    def __call__(self, micro: MicroBatch, *, in_place: bool = False) -> TokenStats:
        """Log-probabilities and entropy ``[b, t]`` of a micro-batch, with gradient if autograd is on.

        Args:
            micro: A micro-batch from `cut`.
            in_place: See `grail_lightning.policy.head.head_gradient`.
        """
        layout = self.policy.layout(self.batch.select(micro.rows), micro.starts)
        graph = torch.is_grad_enabled()
        stats: TokenStats = self.policy(
            layout,
            temperature=self.context.temperature,
            with_entropy=graph,
            entropy_gradient=self.entropy_gradient and graph,
            in_place=in_place,
            teacher=self.teacher.states(micro, layout) if self.teacher is not None and graph else None,
        )
        self._note(micro, layout, stats)
        return stats

    def logprobs_without_gradient(self, rows: Tensor) -> Tensor:
        """``[B, T]`` log-probabilities of some rows, without gradient and dropout; zero on the others.

        In a `SaliencyForward` this is also the first pass of these rows, so it finds their token weights.
        """
        dtype = torch.promote_types(self.policy.model.dtype, torch.float32)
        found = torch.zeros_like(self.token_advantages, dtype=dtype)
        with self.policy.evaluating(), torch.no_grad():
            for micro in self.cut(rows):
                stats = self(micro)
                if not micro.stands_in:
                    scatter(found, micro.rows, stats.logprobs)
        return found

    def _cut(self, rows: Tensor) -> list[MicroBatch]:
        return cut_rows(self.policy, self.batch, rows, self.context.token_budget, share=self.share)

    def _note(self, micro: MicroBatch, layout: TokenLayout, stats: TokenStats) -> None:
        if micro.stands_in:
            return
        self.tokens_run += layout.num_tokens
        if torch.is_grad_enabled() and stats.entropy is not None and not self._scored[micro.rows].all():
            scatter(self.entropies, micro.rows, stats.entropy)
            self._scored[micro.rows] = True


class SaliencyForward(Forward):
    """The first forward pass of each row also gives its saliency, and from it the row's token weights.

    In a prefix tree, rows that need saliency share their prompt alone. A shared response token would otherwise need a
    saliency for each response.

    The saliency of sharded blocks (FSDP2) gathers them once more, which is a collective. There every rank has equally
    many micro-batches with saliency: a rank with fewer fills in with a row whose saliency is not used.

    Args:
        policy: The policy. At the first pass of each row it has the weights from before the update.
        batch: The rollouts, ``B`` rows.
        context: The context of the credit method.
        credit: The method that maps saliency to weights.
        trained: ``[B]`` bool, the rows that the update runs. The saliency of other rows is computed at once.
        clock: The clock that counts saliency as its phase ``credit``.
        share: See `Forward`.
    """

    def __init__(
        self,
        policy: Policy,
        batch: RolloutBatch,
        context: CreditContext,
        credit: SaliencyCredit,
        trained: Tensor,
        clock: PhaseClock,
        *,
        share: bool = True,
    ) -> None:
        self.credit, self.clock = credit, clock
        self.target = credit.target(policy, batch)
        self.pending = (self.target.rows & trained).cpu()
        self._fills_in = stand_in(batch) if isinstance(policy, FSDPModule) else None
        untrained = replace(self.target, rows=self.target.rows & ~trained)
        with gathered(policy) if all_reduce(untrained.rows.sum(), "sum") else nullcontext():
            scores = saliency_of_rows(
                policy, batch, untrained, token_budget=context.token_budget, temperature=context.temperature
            )
        self.scores = scores.to(torch.promote_types(policy.model.dtype, torch.float32))
        weights = credit.weights_from(self.scores, policy, batch, context)
        super().__init__(policy, batch, context, weights, share=share)

    def token_weights(self) -> TokenWeights:
        """The token weights of the batch, from the saliency that has been computed so far.

        They are those that the loss has used, since a row's weights depend on that row alone.
        """
        return self.credit.weights_from(self.scores, self.policy, self.batch, self.context)

    def __call__(self, micro: MicroBatch, *, in_place: bool = False) -> TokenStats:
        """See `Forward`; also computes the token weights of rows that are run for the first time."""
        if micro is not self._fills_in and (micro.stands_in or not self.pending[micro.rows].all()):
            return super().__call__(micro, in_place=in_place)
        piece = self.batch.select(micro.rows)
        layout = self.policy.layout(piece, micro.starts, share_responses=False)
        rows, columns = micro.rows.to(self.scores.device), piece.response_mask.shape[1]
        stats, saliency = forward_with_saliency(
            self.policy,
            layout,
            replace(self.target, objective=self.target.objective[rows, :columns]),
            temperature=self.context.temperature,
            frozen=not torch.is_grad_enabled(),
            in_place=in_place,
        )
        with self.clock.phase("credit"), torch.no_grad():
            scores = saliency()
            if micro.stands_in:
                return stats
            scatter(self.scores, micro.rows, scores)
            weights = self.credit.weights_from(scores, self.policy, piece, self.context)
            check_weights(self.credit, weights, piece)
            assert weights.additive is None, "`SaliencyCredit.weights_from` has no additive stage"
            scatter(self.token_advantages, micro.rows, token_advantages(piece.advantages, weights))
        self.pending[micro.rows] = False
        self._note(micro, layout, stats)
        return stats

    def _cut(self, rows: Tensor) -> list[MicroBatch]:
        """Micro-batches in which rows that still need saliency come first, separate from the others."""
        pending = self.pending[rows]
        mine, budget = rows[pending], self.context.token_budget
        first = cut_rows(self.policy, self.batch, mine, budget, share=self.share, share_responses=False)
        if self._fills_in is not None:
            first = pad_to_longest_rank(first, self._fills_in, self.batch.response_mask.device)
        return first + super()._cut(rows[~pending])

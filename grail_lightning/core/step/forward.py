"""Forward passes of micro-batches: of the policy, and of the frozen reference.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext, TokenWeights
from grail_lightning.core.functional.tokens import TokenStats
from grail_lightning.core.objective import Companion
from grail_lightning.core.policy.layout import TokenLayout
from grail_lightning.core.policy.micro_batch import MicroBatch, cut_rows, dummy_micro_batch, scatter, zero_table
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.reference import Reference
from grail_lightning.core.rollout.batch import RolloutBatch, on_cpu
from grail_lightning.core.runtime.collectives import pad_to_longest_rank


class PassResult(NamedTuple):
    """The result of a forward pass with gradient, of a micro-batch."""

    stats: TokenStats  # Log-probabilities with gradient, and entropy [b, t].
    tokens_run: int  # Tokens that rows of a prefix tree have in common count once.
    weights: TokenWeights | None = None  # [b, t], if this pass computes them; None if they are known already.


class Forward:
    """The forward pass of the policy over the rows of a batch, micro-batch by micro-batch.

    `context` has the token budget and the temperature. With `share_prefixes` common beginnings of rows, prompts and
    responses, are run once, where the model allows it. With `entropy_gradient` the entropy carries a gradient, too. A
    pass with gradient measures the divergence from the `companion`, if there is one.
    """

    def __init__(
        self,
        policy: Policy,
        batch: RolloutBatch,
        context: CreditContext,
        *,
        share_prefixes: bool = True,
        entropy_gradient: bool = False,
        companion: Companion | None = None,
    ) -> None:
        _ = policy.compiled_blocks  # Tried before the first pass, in which the host must not wait for the device.
        self.policy, self.batch, self.context = policy, batch, context
        self.on_cpu = on_cpu(batch)  # Layouts are made of it, without a wait for the device.
        self.share_prefixes, self.entropy_gradient, self.companion = share_prefixes, entropy_gradient, companion

    def cut(self, rows: Tensor) -> list[MicroBatch]:
        """The rows as micro-batches, equally many on each rank."""
        return pad_to_longest_rank(self._cut(rows), dummy_micro_batch(self.on_cpu), self.batch.response_mask.device)

    def __call__(self, micro: MicroBatch, *, in_place: bool = False) -> PassResult:
        """Run a micro-batch from `cut` with gradient; `in_place` is that of `HeadGradient`."""
        layout = self._layout(micro)
        stats = self.policy.token_stats(
            layout,
            temperature=self.context.temperature,
            entropy_gradient=self.entropy_gradient,
            in_place=in_place,
            other_states=None if self.companion is None else self.companion.states(micro, layout),
        )
        return PassResult(stats, layout.num_tokens)

    def without_gradient(self, rows: Tensor) -> Iterator[tuple[MicroBatch, Tensor, TokenWeights | None]]:
        """Passes of some rows without gradient and dropout: log-probabilities ``[b, t]``, and weights (`PassResult`).

        Every rank must exhaust it: the passes are collectives.
        """
        with self.policy.evaluating(), torch.no_grad():
            for micro in self.cut(rows):
                logprobs, weights = self._frozen_pass(micro)
                if not micro.is_dummy:
                    yield micro, logprobs, weights

    def weights_so_far(self) -> TokenWeights | None:
        """The token weights by fused saliency, as far as passes have run; None without it."""
        return None

    def _frozen_pass(self, micro: MicroBatch) -> tuple[Tensor, TokenWeights | None]:
        return self.policy(self._layout(micro), temperature=self.context.temperature), None

    def _layout(self, micro: MicroBatch) -> TokenLayout:
        return self.policy.layout(self.on_cpu.select(micro.rows), micro.starts)

    def _cut(self, rows: Tensor) -> list[MicroBatch]:
        return cut_rows(self.policy, self.on_cpu, rows, self.context.token_budget, share=self.share_prefixes)


def reference_logprobs(reference: Reference, trained: Forward, rows: Tensor) -> Tensor:
    """``[B, T]`` log-probabilities of some rows of a batch under the reference, zero on the others."""
    batch = trained.batch
    with reference.running(trained.policy) as policy:
        logprobs = zero_table(policy, batch)
        forward = Forward(policy, batch, trained.context, share_prefixes=trained.share_prefixes)
        for micro, found, _ in forward.without_gradient(rows):
            scatter(logprobs, micro.rows, found)
    return logprobs

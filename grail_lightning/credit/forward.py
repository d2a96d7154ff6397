"""Figures of each token from a forward pass without gradient, in micro-batches; for credit methods.

Shapes: ``B`` rows, ``T`` response tokens, ``K`` figures a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext
from grail_lightning.credit.saliency import explaining
from grail_lightning.functional.tokens import TokenStats, entropy_of
from grail_lightning.policy import Policy
from grail_lightning.policy.layout import TokenLayout
from grail_lightning.policy.micro_batch import cut_rows, scatter, stand_in
from grail_lightning.runtime.collectives import pad_to_longest_rank

Measure = Callable[[TokenLayout], tuple[Tensor, ...]]


@torch.no_grad()
def measure_rows(
    policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor, measure: Measure
) -> tuple[Tensor, ...]:
    """The figures of some rows, micro-batch by micro-batch, in evaluation mode.

    Ranks make as many forward passes as the one with the most, so that sharded weights stay in step.

    Args:
        policy: Put into evaluation mode meanwhile.
        batch: ``B`` rows.
        context: Its token budget bounds a forward pass.
        rows: ``[n]`` long, the rows to measure.
        measure: From a layout of ``b`` trimmed rows to ``K`` tensors ``[b, t]``.

    Returns:
        ``K`` tensors ``[B, T]``, zero on the other rows; ``()`` if no rank has a row.
    """
    everything: tuple[Tensor, ...] = ()
    with explaining(policy):
        parts = cut_rows(policy, batch, rows, context.token_budget)
        for micro in pad_to_longest_rank(parts, stand_in(batch), batch.response_mask.device):
            found = measure(policy.layout(batch.select(micro.rows), micro.starts))
            everything = everything or tuple(f.new_zeros(batch.response_mask.shape) for f in found)
            if not micro.stands_in:
                for whole, figure in zip(everything, found, strict=True):
                    scatter(whole, micro.rows, figure)
    return everything


def entropies(policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor) -> Tensor:
    """``[B, T]``: the entropy in nats of the distribution that each token was drawn from; zero on the other rows."""

    def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
        stats: TokenStats = policy(layout, temperature=context.temperature, with_entropy=True)
        return (entropy_of(stats),)

    return _only(measure_rows(policy, batch, context, rows, measure), batch)


def logprobs(
    policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor, run: Callable[..., Tensor] | None = None
) -> Tensor:
    """``[B, T]``: log-probabilities of the tokens, zero on the other rows.

    Args:
        policy: Which policy.
        batch: ``B`` rows.
        context: Token budget and temperature.
        rows: ``[n]`` long, the rows to compute.
        run: In place of calling the policy: gets a layout and ``temperature=``.
    """

    def plain(layout: TokenLayout, *, temperature: float) -> Tensor:
        found: Tensor = policy(layout, temperature=temperature).logprobs
        return found

    def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
        return ((run or plain)(layout, temperature=context.temperature),)

    return _only(measure_rows(policy, batch, context, rows, measure), batch)


def _only(found: tuple[Tensor, ...], batch: RolloutBatch) -> Tensor:
    return found[0] if found else torch.zeros(batch.response_mask.shape, device=batch.response_mask.device)

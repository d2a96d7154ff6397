"""Figures of each token from a forward pass without gradient, in micro-batches; for credit methods.

Shapes: ``B`` rows, ``T`` response tokens, ``K`` figures a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.credit.base import CreditContext
from grail_lightning.credit.saliency import explaining
from grail_lightning.policy import Policy
from grail_lightning.ranks import in_step
from grail_lightning.rollout import RolloutBatch, micro_batches

Measure = Callable[[RolloutBatch], tuple[Tensor, ...]]


@torch.no_grad()
def measure_rows(
    policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor, measure: Measure
) -> tuple[Tensor, ...]:
    """What `measure` says of some rows, micro-batch by micro-batch, in evaluation mode.

    Ranks make as many forward passes as the one with the most, so that sharded weights stay in step.

    Args:
        policy: Put into evaluation mode meanwhile.
        batch: ``B`` rows.
        context: Its token budget bounds a forward pass.
        rows: ``[n]`` long, the rows to measure.
        measure: From ``b`` trimmed rows to ``K`` tensors ``[b, t]``.

    Returns:
        ``K`` tensors ``[B, T]``, zero on the other rows; ``()`` if no rank has a row.
    """
    none = torch.zeros(0, dtype=torch.long)
    parts = in_step(micro_batches(batch.lengths, context.token_budget, rows), none, batch.response_mask.device)
    everything: tuple[Tensor, ...] = ()
    with explaining(policy):
        for part in parts:
            found = measure(batch.select(part if len(part) else torch.zeros(1, dtype=torch.long)))
            everything = everything or tuple(f.new_zeros(batch.response_mask.shape) for f in found)
            if len(part):
                for whole, figure in zip(everything, found, strict=True):
                    whole[part.to(whole.device), : figure.shape[1]] = figure
    return everything


def entropies(policy: Policy, batch: RolloutBatch, context: CreditContext, rows: Tensor) -> Tensor:
    """``[B, T]``: the entropy in nats of the distribution that each token was drawn from; zero on the other rows."""

    def measure(piece: RolloutBatch) -> tuple[Tensor]:
        stats = policy(
            piece.input_ids,
            piece.attention_mask,
            piece.response_mask,
            temperature=context.temperature,
            with_entropy=True,
        )
        assert stats.entropy is not None
        return (stats.entropy,)

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
        run: In place of calling the policy: gets ``input_ids, attention_mask, response_mask, temperature=``.
    """

    def plain(*inputs: Tensor, temperature: float) -> Tensor:
        found: Tensor = policy(*inputs, temperature=temperature).logprobs
        return found

    def measure(piece: RolloutBatch) -> tuple[Tensor]:
        inputs = piece.input_ids, piece.attention_mask, piece.response_mask
        return ((run or plain)(*inputs, temperature=context.temperature),)

    return _only(measure_rows(policy, batch, context, rows, measure), batch)


def _only(found: tuple[Tensor, ...], batch: RolloutBatch) -> Tensor:
    return found[0] if found else torch.zeros(batch.response_mask.shape, device=batch.response_mask.device)

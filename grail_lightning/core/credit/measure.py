"""Measurements of each token in forward passes without gradient, by micro-batches, for credit methods.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens, ``K`` figures a token. Rows
that are not asked for have figures of 0, and so has padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext
from grail_lightning.core.credit.saliency import explaining
from grail_lightning.core.functional.certainty import Figures, repeat_probability
from grail_lightning.core.functional.tokens import in_chunks
from grail_lightning.core.policy.layout import TokenLayout, right_padded_layout
from grail_lightning.core.policy.micro_batch import cut_rows, dummy_micro_batch, scatter
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import SampledBatch
from grail_lightning.core.runtime.collectives import pad_to_longest_rank

_Measure = Callable[[TokenLayout], tuple[Tensor, ...]]


@torch.no_grad()
def measure_rows(
    policy: Policy,
    batch: SampledBatch,
    context: CreditContext,
    rows: Tensor,
    measure: _Measure,
    number: int,
    *,
    padded: bool = False,
) -> tuple[Tensor, ...]:
    """Measure some rows, micro-batch by micro-batch, in evaluation mode: `number` tensors ``[B, T]``.

    `measure` is a function from a layout of ``b`` trimmed rows to tensors ``[b, t]``. If `padded`, every row is run by
    itself and padded on the right. Every rank makes equally many passes, as the collectives of sharded weights require.
    """
    tables: tuple[Tensor, ...] = ()
    mask = batch.response_mask
    with explaining(policy):
        parts = cut_rows(policy, batch, rows, context.token_budget, share=not padded)
        for micro in pad_to_longest_rank(parts, dummy_micro_batch(batch), mask.device):
            some = batch.select(micro.rows)
            tensors = some.input_ids, some.attention_mask, some.response_mask
            figures = measure(right_padded_layout(*tensors) if padded else policy.layout(some, micro.starts))
            tables = tables or tuple(f.new_zeros(mask.shape) for f in figures)
            if not micro.is_dummy:
                for table, figure in zip(tables, figures, strict=True):
                    scatter(table, micro.rows, figure)
    return tables or tuple(torch.zeros(mask.shape, device=mask.device) for _ in range(number))


def measure_logits(
    policy: Policy, batch: SampledBatch, context: CreditContext, rows: Tensor, figures: Figures
) -> tuple[Tensor, Tensor]:
    """Two figures ``[B, T]`` of logits that exist in chunks; `figures` is a function such as `self_certainty`."""

    def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
        states = layout.at_predictors(policy.decode(layout))
        of_tokens = in_chunks(
            lambda states, ids: figures(policy.head(states), ids, context.temperature),
            states,
            layout.targets,
            policy.chunk_tokens,
        )
        return tuple(layout.to_rows(figure) for figure in of_tokens)

    first, second = measure_rows(policy, batch, context, rows, measure, 2)
    return first, second


def gradient_energies(policy: Policy, batch: SampledBatch, context: CreditContext, rows: Tensor) -> Tensor:
    r"""``[B, T]`` float64: :math:`1 - 2\pi(y_t) + \sum_v \pi(v)^2`, zero on other rows and outside the mask.

    It is the squared norm of the gradient of a token's log-probability with respect to its logits.
    """
    probability, repeated = measure_logits(policy, batch, context, rows, repeat_probability)
    scored = torch.zeros_like(batch.response_mask)
    scored[rows] = batch.response_mask[rows]
    return (1 - 2 * probability.double() + repeated.double()).masked_fill(~scored, 0)


def entropies(policy: Policy, batch: SampledBatch, context: CreditContext, rows: Tensor) -> Tensor:
    """``[B, T]``: the entropy in nats of the distribution that each token was drawn from; zero on the other rows."""

    def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
        return (policy.token_stats(layout, temperature=context.temperature).entropy,)

    return measure_rows(policy, batch, context, rows, measure, 1)[0]


def logprobs(
    policy: Policy,
    batch: SampledBatch,
    context: CreditContext,
    rows: Tensor,
    run: Callable[..., Tensor] | None = None,
) -> Tensor:
    """``[B, T]``: log-probabilities of the tokens, zero on the other rows.

    `run` is called in place of the policy, with a layout and ``temperature=``.
    """

    def measure(layout: TokenLayout) -> tuple[Tensor, ...]:
        return ((run or policy)(layout, temperature=context.temperature),)

    return measure_rows(policy, batch, context, rows, measure, 1)[0]

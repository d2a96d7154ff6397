"""The policy gradients that credits make of the same rollouts, and the products of them that figures are made of.

Shapes: ``N`` batches, ``K`` credits, ``P`` trainable parameters, ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grail_lightning.app.benchmark.rollouts import TOKEN_BUDGET
from grail_lightning.core.policy.micro_batch import cut_rows
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import SampledBatch

_BLOCK = 2**16  # Parameters whose gradients are in float64 at one time.


def policy_gradients(
    policy: Policy,
    batches: Sequence[SampledBatch],
    credits: Mapping[str, Sequence[Tensor]],
    *,
    temperature: float = 1.0,
    done: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    r"""The gradient of each credit on each batch, ``[N, P]`` float32 by the credit's name.

    .. math:: g_n = \sum_{i, t} A_{it} \, \nabla_\theta \log \pi_\theta(y_{it} \mid x_i, y_{i, <t})

    All credits share one forward pass of each micro-batch. Credits that are equal on all batches share one tensor.

    Args:
        policy: The policy; it is run in evaluation mode, without dropout.
        batches: The rollouts.
        credits: The token advantages ``[B, T]`` of each batch, by the credit's name; 0 outside the response mask.
        temperature: The sampling temperature, by which the logits are divided.
        done: Called with the number of finished batches after each of them.
    """
    distinct: dict[str, Sequence[Tensor]] = {}
    same: dict[str, str] = {}
    for name, its in credits.items():
        equal = (known for known, others in distinct.items() if all(map(torch.equal, its, others)))
        same[name] = next(equal, name)
        if same[name] == name:
            distinct[name] = its
    parameters = [p for p in policy.parameters() if p.requires_grad]
    sizes = [p.numel() for p in parameters]
    found = {name: torch.zeros(len(batches), sum(sizes)) for name in distinct}
    with policy.evaluating(), torch.enable_grad():
        for number, batch in enumerate(batches):
            tables = {name: per_batch[number] for name, per_batch in distinct.items()}
            sums = {name: _views(gradients[number], parameters) for name, gradients in found.items()}
            _add_gradients(policy, batch, tables, parameters, sums, temperature)
            if done is not None:
                done(number + 1)
    return {name: found[other] for name, other in same.items()}


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]


def _add_gradients(
    policy: Policy,
    batch: SampledBatch,
    tables: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    sums: Mapping[str, Sequence[Tensor]],
    temperature: float,
) -> None:
    """Add the gradients of a batch with the token advantages of `tables` to the tensors of `sums`."""
    trained = torch.stack([table.any(1) for table in tables.values()])  # [K, B]
    for micro in cut_rows(policy, batch, trained.any(0).nonzero().flatten(), TOKEN_BUDGET):
        layout = policy.layout(batch.select(micro.rows), micro.starts)
        logprobs = policy(layout, temperature=temperature)  # A micro-batch has the columns of its longest row.
        active = [name for name, rows in zip(tables, trained, strict=True) if rows[micro.rows].any()]
        for name in active:
            objective = (tables[name][micro.rows, : logprobs.shape[1]].to(logprobs) * logprobs).sum()
            parts = torch.autograd.grad(
                objective, parameters, retain_graph=name != active[-1], allow_unused=True, materialize_grads=True
            )
            for total, part in zip(sums[name], parts, strict=True):
                total.add_(part)


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Products:
    """Products of the gradients ``g_n`` of a credit on N batches, with themselves and with ``u_n`` of uniform credit.

    Entries of two different batches are free of the noise that both factors have of one batch. All are float64.
    """

    own: Tensor  # [N, N]: g_i · g_j
    power: Tensor  # [N]: the squared norm of g_n, or the product of two estimates of it whose noise is independent.
    along: Tensor  # [N, N]: g_i · u_j
    adam: Tensor  # [N, N]: (g_i / s) · u_j, with s [P] the root mean square of each entry of g over the N batches.

    def first(self, number: int) -> Products:
        """Those of the first batches; Adam's scale stays that of all."""
        cut = {f.name: getattr(self, f.name)[:number] for f in fields(self)}
        return Products(**{name: part if part.ndim == 1 else part[:, :number] for name, part in cut.items()})


def products(gradients: Tensor, uniform: Tensor, other: Tensor | None = None) -> Products:
    """The products of a credit's gradients ``[N, P]`` with those of uniform credit.

    `other` are the gradients of a second estimate of the same advantages with a noise of its own: the gradient is the
    mean of both then, and the noise drops out of its power. Adam's scale keeps the noise of the mean.
    """
    number = len(gradients)
    own, along, adam = (torch.zeros(number, number, dtype=torch.float64) for _ in range(3))
    power = torch.zeros(number, dtype=torch.float64)
    for start in range(0, gradients.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        one, base = gradients[:, columns].double(), uniform[:, columns].double()
        two = one if other is None else other[:, columns].double()
        mean = (one + two) / 2
        scaled = mean / mean.square().mean(0).sqrt().clamp(min=1e-12)
        own += mean @ mean.T
        power += (one * two).sum(1)
        along += mean @ base.T
        adam += scaled @ base.T
    return Products(own=own, power=power, along=along, adam=adam)


@dataclass(frozen=True, kw_only=True)
class References:
    """The products of the credits that every method is compared with, on the same batches."""

    uniform: Products
    constants: Mapping[str, Products]  # Of ``r − c·mean``, by its name.
    limits: Mapping[str, Products]  # Of resampled values, by the credit's name.

    def first(self, number: int) -> References:
        """Those of the first batches."""

        def cut(some: Mapping[str, Products]) -> dict[str, Products]:
            return {name: one.first(number) for name, one in some.items()}

        return References(uniform=self.uniform.first(number), constants=cut(self.constants), limits=cut(self.limits))

    @property
    def number(self) -> int:
        """The number of batches."""
        return len(self.uniform.power)

"""Calls of credit methods and controls, with a check of what they return, since users can write their own.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Real

from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, CreditControl, Mean, TokenCredit, TokenWeights
from grail_lightning.policy import Policy
from grail_lightning.runtime.checks import Claim, check_claims, check_tensor


def weigh(credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
    """The weights of a method, checked by `check_weights`."""
    weights = credit(policy, batch, context)
    check_weights(credit, weights, batch)
    return weights


def weigh_part(
    credit: TokenCredit, policy: Policy, batch: RolloutBatch, context: CreditContext, part: int = 0
) -> TokenWeights:
    """The weights of a method inside a composed one, computed as often as its own `Needs.refresh` says.

    `part` is the index of these weights in the `TokenWeights.parts` that the outer method returns.
    """
    # A user's outer method may return no parts.
    parts = () if context.earlier is None else context.earlier.parts
    earlier = parts[part] if part < len(parts) else None
    if earlier is not None and credit.needs().refresh == "rollout":
        return earlier
    return weigh(credit, policy, batch, replace(context, earlier=earlier))


def controlled(
    control: CreditControl, weights: TokenWeights, batch: RolloutBatch, context: CreditContext
) -> TokenWeights:
    """The token weights that a control returns, checked by `check_weights`; `parts` stay those of the method."""
    changed = control(weights, batch, context)
    check_weights(control, changed, batch)
    return replace(changed, parts=weights.parts)


def check_weights(giver: TokenCredit | CreditControl, weights: object, batch: RolloutBatch) -> None:
    """Raise a ValueError for what a method or control must not return for `batch`.

    That is no `TokenWeights`; a tensor in it of the wrong dtype, shape or device, that requires a gradient or is not
    finite; negative `values`; `values` or an `additive` stage outside the response mask; a metric that is no number.
    """
    name, mask = f"`{type(giver).__name__}`", batch.response_mask
    if not isinstance(weights, TokenWeights):
        raise ValueError(
            f"{name} must return a `TokenWeights`, but got {type(weights).__name__}. "
            "Return `TokenWeights(values=…)`, of grail_lightning.credit."
        )
    tensors: dict[str, Tensor] = {"values": weights.values}
    optional = {"scores": weights.scores, "additive": weights.additive}
    tensors |= {field: tensor for field, tensor in optional.items() if tensor is not None}
    for field, tensor in tensors.items():
        check_tensor(f"{name} must return `{field}`", tensor, "floating-point", mask.shape, mask.device)
    check_tensor(f"{name} must return `fallback`", weights.fallback, "bool", mask.shape[:1], mask.device)
    claims = [Claim(f"{name} must return finite `{f}`", ~tensor.isfinite(), tensor) for f, tensor in tensors.items()]
    claims.append(Claim(f"{name} must return `values` of at least 0", weights.values < 0, weights.values))
    claims += [
        Claim(f"{name} must return `{f}` that are 0 outside `batch.response_mask`", (tensor != 0) & ~mask, tensor)
        for f, tensor in tensors.items()
        if f != "scores"
    ]
    check_claims(claims, "See `batch.texts` of that row; `.masked_fill(~batch.response_mask, 0)` clears padding.")
    for metric, value in weights.metrics.items():
        if not isinstance(value, (Mean, Real)):
            raise ValueError(
                f"{name} must return `metrics` that are numbers or `Mean(total, size)`, but got {type(value).__name__} "
                f"for `{metric}`. Call `.item()` of a tensor."
            )

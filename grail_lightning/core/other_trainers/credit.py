"""`run_credit`: the advantages of tokens for the loss of any trainer.

Shapes: ``B`` rows (rollouts), ``T`` response tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grail_lightning.core.credit.base import CreditContext, CreditControl, TokenCredit, token_advantages
from grail_lightning.core.credit.service import FrozenReference, listed
from grail_lightning.core.other_trainers.model import GivenReference
from grail_lightning.core.other_trainers.rollouts import GivenRollouts
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.assign import scored_rows, weigh_batch, with_unscored_rows
from grail_lightning.core.step.figures import StepOutput, Tally, add_credit
from grail_lightning.core.step.update import without_lone_rows


class AssignedCredit(NamedTuple):
    """The credit of a batch of another trainer."""

    advantages: Tensor  # [B, T] float32, as wide as the ids that were given; 0 outside `response_mask`.
    output: StepOutput  # The batch, its token weights, and figures by name, `credit/…`, over all ranks.


def run_credit(
    credit: TokenCredit,
    policy: Policy,
    rollouts: GivenRollouts,
    *,
    control: CreditControl | None = None,
    reference: Policy | None = None,
    step: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    token_budget: int = 16_384,
) -> Tensor:
    r"""The advantage of each token, for the loss of any trainer.

    .. math:: A_{it} = A_i\, w_{it} + \mathrm{additive}_{it}

    ``A_i`` are the rollouts' advantages, ``w`` and ``additive`` the credit method's. Call it with the weights that
    sampled, under the trainer's autocast, outside of `torch.inference_mode`, on every rank equally often. Parameters
    receive no gradient, and modes and random states stay as they are.

    Args:
        credit: The method. If it has a state (`RLSD`), `credit.state_dict()` belongs to your checkpoints.
        policy: The model, from `as_policy`.
        rollouts: Ids, masks, rewards and groups.
        control: A control experiment around the method.
        reference: The frozen reference, from `as_policy`, for methods that compare with it (`DGPO`); not needed if the
            policy has adapters.
        step: The number of optimiser steps taken so far: a key of random numbers, and a clock of methods that decay.
        seed: The run's seed, the other key.
        temperature: The sampling temperature; logits are divided by it.
        token_budget: Most tokens in a forward pass.

    Returns:
        ``[B, T]`` float32; 0 outside the response mask.

    Raises:
        ValueError: If the method uses what this function does not have: an engine, a second model, a reference.
    """
    context = context_of(
        credit, policy, reference=reference, step=step, seed=seed, temperature=temperature, token_budget=token_budget
    )
    return assign(credit, control, policy, rollouts, context).advantages


def context_of(
    credit: TokenCredit,
    policy: Policy,
    *,
    reference: Policy | None,
    step: int,
    seed: int,
    temperature: float,
    token_budget: int,
) -> CreditContext:
    """The context of a credit method, with the arguments of `run_credit`."""
    check_services(credit, has_reference=reference is not None or policy.has_adapters)
    return CreditContext(
        step=step,
        generator=torch.Generator().manual_seed(derive_seed(seed, "credit", step)),
        token_budget=token_budget,
        temperature=temperature,
        services={FrozenReference: GivenReference(reference or policy)},
    )


def assign(
    credit: TokenCredit, control: CreditControl | None, policy: Policy, rollouts: GivenRollouts, context: CreditContext
) -> AssignedCredit:
    """The result of `run_credit` with what it was computed from."""
    whole = rollouts.batch(policy)
    batch = scored_rows(whole)
    weights = without_lone_rows(weigh_batch(credit, control, policy, batch, context), batch)
    tally = Tally()
    if batch.scored.all():  # Else this rank has none.
        add_credit(tally, batch, weights)
    weights = with_unscored_rows(weights, whole)
    advantages = token_advantages(whole.advantages, weights).float()
    missing = rollouts.response_ids.shape[1] - advantages.shape[1]
    padded = torch.nn.functional.pad(advantages, (0, missing))
    return AssignedCredit(padded, StepOutput(whole, weights, tally.compute()))


def check_services(credit: TokenCredit, *, has_reference: bool) -> None:
    """Check that a method uses nothing that only a run of `GrailModule` opens."""
    for kind, owner in listed([credit]).items():
        name = f"`{type(owner).__name__}`"
        if issubclass(kind, FrozenReference):
            if not has_reference:
                raise ValueError(
                    f"`credit` must be a method that needs no reference, since this run has none, but got {name}, "
                    "which compares the policy with it. Give a reference (under TRL `beta` above 0) or adapters, or "
                    "take another method."
                )
            continue
        what = "samples with the rollout engine" if kind.uses_engine else "uses the service"
        what = "trains a second model" if kind.trains_model else what
        raise ValueError(
            f"`credit` must be a method that reads rollouts and model alone, but got {name}, which {what} "
            f"(`{kind.__name__}`): only `GrailModule` has that. Take another method."
        )

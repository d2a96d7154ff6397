"""The advantages of a batch, and its token weights: by the credit method, or by the update's first forward passes.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor

from grail_lightning.answers.records import AnswerSpan, Verdict
from grail_lightning.core.advantages import AdvantageContext, AdvantageEstimator
from grail_lightning.core.credit.base import (
    CreditContext,
    CreditControl,
    Refresh,
    TokenCredit,
    TokenWeights,
    check_weights,
    uniform_weights,
    weigh,
)
from grail_lightning.core.credit.service import Owner, listed
from grail_lightning.core.distributed.sharding import gathered
from grail_lightning.core.engines.base import build_batch
from grail_lightning.core.objective import Objective
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt, Task, TokenText
from grail_lightning.core.rollout.batch import AnswerMasks, GradedBatch, RolloutBatch, cut_responses
from grail_lightning.core.runtime.checks import Claim, check_claims, check_option, check_tensor
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.step.forward import Forward
from grail_lightning.core.step.loss import live_rows, loss_mask


def check_credit(advantage: AdvantageEstimator | None, credit: TokenCredit) -> None:
    """Check when the method's weights are computed, and that it does not ignore an estimator that is configured."""
    check_option(f"{type(credit).__name__}.refresh", credit.refresh, Refresh)
    if advantage is not None and credit.replaces_advantage:
        raise ValueError(
            f"`model.advantage` must be null with `{type(credit).__name__}`, which has a baseline of its own and "
            f"computes the whole advantage of each token, but got {type(advantage).__name__}, which would have no "
            "effect. Set --model.advantage=null, or another `model.credit`."
        )


def compute_advantages(
    batch: GradedBatch,
    group_size: int,
    estimator: AdvantageEstimator,
    objective: Objective,
    policy: Policy,
    context: CreditContext,
) -> RolloutBatch:
    """The batch with its rollouts' advantages ``[B]`` float32 by the estimator; 0 for rows without a reward."""
    _check_rewards(batch, context.step)
    mask = loss_mask(batch, objective)
    advantage_context = AdvantageContext(policy=policy, credit=context, mask=mask, row_scale=objective.row_scale(mask))
    with _gathered_models(estimator if estimator.runs_policy else None, policy, context):
        advantages = estimator(batch, group_size, advantage_context)
    _check_advantages(estimator, advantages, batch)
    return batch.with_advantages(advantages.float())


def _check_advantages(estimator: AdvantageEstimator, advantages: Tensor, batch: GradedBatch) -> None:
    name = f"`{type(estimator).__name__}`"
    check_tensor(
        f"{name} must return advantages", advantages, "floating-point", batch.rewards.shape, batch.rewards.device
    )
    claims = [
        Claim(f"{name} must return finite advantages", ~advantages.isfinite(), advantages),
        Claim(f"{name} must return 0 for rows without a reward", (advantages != 0) & ~batch.scored, advantages),
    ]
    check_claims(claims, "`batch.scored` tells these rows, whose `batch.rewards` are NaN.")


def _check_rewards(batch: GradedBatch, step: int) -> None:
    """Check that some response of the first batch (optimiser step 0), on any rank, has a reward. A collective then."""
    if step or int(all_reduce(batch.scored.sum(), "sum")):
        return
    names = ", ".join(f"`{name}`" for name in batch.reward_values) or f"`{type(batch.prompts[0].task).__name__}.reward`"
    raise ValueError(
        f"Some response of the first batch must have a reward, but got None for all of them: {names} gave no opinion "
        "about any (as does an environment whose `get_reward` returns None). Return numbers, 0 for a response that "
        "earns nothing, or add a reward such as `correctness`."
    )


def scored_rows(batch: RolloutBatch) -> RolloutBatch:
    """The rows of the batch that have a reward. For credit and loss the others are as if they had not been sampled.

    A rank without a row that has a reward keeps its first row, with which it joins the passes of the other ranks:
    `loss_mask` and `weigh_batch` leave it out.
    """
    if batch.scored.all():
        return batch
    return batch.select(batch.scored.nonzero().flatten() if batch.scored.any() else torch.tensor([0]))


def assign_credit(
    credit: TokenCredit,
    control: CreditControl | None,
    policy: Policy,
    batch: RolloutBatch,
    context: CreditContext,
    objective: Objective,
    clock: PhaseClock,
    *,
    share_prefixes: bool = True,
) -> tuple[Forward, TokenWeights]:
    """The `Forward` that the update calls for each micro-batch, and the token weights of the credit method.

    With fused saliency (`core.step.fused`) the weights of rows that still need saliency are provisional: the
    first pass of such a row returns the right ones. Those of all other rows are final. The clock counts credit as its
    phase ``credit``.
    """
    companion = objective.companion(policy, batch, context)
    with clock.phase("credit"):
        if credit.fuses:
            from grail_lightning.core.step.fused import SaliencyForward, method_to_fuse

            if (fused := method_to_fuse(credit, control, objective, companion, policy)) is not None:
                # Without an additive stage, rows without an advantage have no gradient of their own.
                live = live_rows(batch, loss_mask(batch, objective), all_rows=objective.trains_all_rows)
                returning = SaliencyForward(policy, batch, context, fused, live, clock, share_prefixes=share_prefixes)
                return returning, returning.weights_so_far()
        weights = weigh_batch(credit, control, policy, batch, context)
    bonus = objective.entropy_coefficient > 0
    forward = Forward(
        policy, batch, context, share_prefixes=share_prefixes, entropy_gradient=bonus, companion=companion
    )
    return forward, weights


def weigh_batch(
    credit: TokenCredit, control: CreditControl | None, policy: Policy, batch: RolloutBatch, context: CreditContext
) -> TokenWeights:
    """Token weights of a credit method, changed by the control if there is one.

    They are called with the rows that have a reward; the others have weight 1. (In training `scored_rows` has left
    these out, but for the one row of a rank that has no other; in `predict` they are here.) No method and no control is
    called with an empty batch, which a rank may have in the last batch of `predict`. That rank calls them with a row
    that has no response token, so that it joins their collectives without a part in them.
    """
    rows = batch if batch.scored.all() else batch.select(batch.scored.nonzero().flatten())
    empty = not len(rows)
    if empty:
        rows = _row_without_tokens(policy)
    with _gathered_models(credit if credit.runs_policy else None, policy, context):
        weights = weigh(credit, policy, rows, context)
    if control is not None:
        weights = control(weights, rows, context)
        check_weights(control, weights, rows)
    return uniform_weights(batch) if empty else with_unscored_rows(weights, batch)


@contextmanager
def _gathered_models(owner: Owner | None, policy: Policy, context: CreditContext) -> Iterator[None]:
    """Gathered parameters inside the context: of the policy, and of the models of the open services of the owner.

    `owner` is None for a method or an estimator that runs no model. Then nothing is gathered, since a device may have
    no room for all parameters of a sharded policy.
    """
    models: list[Policy] = []
    if owner is not None:
        opened = (context.services[kind] for kind in listed([owner]) if kind in context.services)
        models = [policy, *(model for service in opened for model in service.models_to_gather())]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(gathered(model))
        yield


def with_unscored_rows(weights: TokenWeights, batch: RolloutBatch) -> TokenWeights:
    """Weights of the rows that have a reward as those of the batch; the other rows have weight 1 and nothing added."""
    if batch.scored.all():
        return weights
    rows = batch.scored.nonzero().flatten()  # None on a rank that took another row to join the others.

    def spread(part: Tensor, elsewhere: Tensor) -> Tensor:
        whole = elsewhere.to(part.dtype, copy=True)
        whole[rows, : part.shape[1]] = part[: len(rows)]
        return whole

    ones, fallback = batch.response_mask, torch.zeros_like(batch.scored)
    fallback[rows] = weights.fallback[: len(rows)]
    answer = weights.answer
    if answer is not None:
        names = [f.name for f in fields(answer)]
        answer = AnswerMasks(**{n: spread(getattr(answer, n), getattr(batch.answer, n)) for n in names})
    return TokenWeights(
        values=spread(weights.values, ones),
        fallback=fallback,
        scores=None if weights.scores is None else spread(weights.scores, torch.zeros_like(ones)),
        additive=None if weights.additive is None else spread(weights.additive, torch.zeros_like(ones)),
        answer=answer,
        unscaled=None if weights.unscaled is None else spread(weights.unscaled, ones),
        metrics=weights.metrics,
    )


class _Unasked:
    """The task of a row that nobody grades: all that a credit method may ask of it."""

    has_environment = False

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        return []

    def label_steps(self, text: str, prompt: Prompt) -> None:
        return None


def _row_without_tokens(policy: Policy) -> RolloutBatch:
    """One row with a prompt and with padding in place of a response, as if its advantage and its reward were 0."""
    pad = policy.tokenizer.pad_token_id
    # Two tokens, because a row's last one is not run.
    prompt = Prompt(messages=TokenText("", [pad, pad]), reference="", task=cast(Task, _Unasked()))
    padded = build_batch(policy, [prompt], 1, [[pad]], [True])
    none, zero = torch.zeros_like(padded.response_mask), torch.zeros(1, device=policy.device, dtype=torch.float32)
    return RolloutBatch(
        **cut_responses(padded, none.sum(1)).fields(),
        answer=AnswerMasks(whole=none, content=none, marker=none, after=none),
        rewards=zero.double(),
        correct=none.any(1),
        verdicts=[Verdict.missing("")],
        advantages=zero,
    )

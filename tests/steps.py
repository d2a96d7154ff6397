"""Optimiser steps on ready batches, whose rows share what they begin with, or do not."""

import dataclasses

import torch

from grail_lightning import DrGRPO, Execution
from grail_lightning.core.credit.base import TokenWeights
from grail_lightning.core.runtime.clock import PhaseClock
from grail_lightning.core.runtime.collectives import whole_tensor
from grail_lightning.core.step.assign import assign_credit
from grail_lightning.core.step.execution import resolve_cap
from grail_lightning.core.step.forward import Forward
from grail_lightning.core.step.update import Update
from grail_lightning.credit import CreditContext, FrozenReference, SampledContinuations, TrainedModel

FEWER = {"shared_tokens": 0.0}  # What is meant to differ.
USUAL = {"clip_high": 0.28, "mask_truncated": True}  # As in the configs of this repository.
EXECUTION = {field.name for field in dataclasses.fields(Execution)}


def configured(options, group_size=4):
    """Options of either kind by name as an `Objective` and an `Execution`.

    The objective is of the class `algorithm`, or Dr. GRPO as it is in the configs.
    """
    execution = {name: value for name, value in options.items() if name in EXECUTION}
    objective = {name: value for name, value in options.items() if name not in EXECUTION}
    kind = objective.pop("algorithm", None)
    objective = DrGRPO(**USUAL | objective) if kind is None else kind(**objective)
    return objective, Execution(**{"group_size": group_size} | execution)


def context_for(policy, token_budget=16384, step=3, **more):
    """A context of credit with a generator of its own."""
    return CreditContext(step=step, generator=torch.Generator().manual_seed(0), token_budget=token_budget, **more)


def opened(reference=None, continuations=None, second=None):
    """The open services of a context: a frozen policy, continuations and a trained model, as far as they are given."""
    services = {} if reference is None else {FrozenReference: FrozenReference(reference)}
    services |= {} if continuations is None else {SampledContinuations: continuations}
    return services | ({} if second is None else {TrainedModel: second})


def token_weights(batch, values=None, additive=None):
    """Token weights ``[B, T]`` as a credit method gives them; without values all are 1."""
    return TokenWeights(values=batch.response_mask.float() if values is None else values, additive=additive)


def update_of(
    policy,
    batch,
    weights=None,
    reference=None,
    *,
    credit=None,
    limit=9,
    seed=0,
    temperature=1.0,
    continuations=None,
    refreshes=False,
    forward_of=Forward,
    **options,
):
    """The `Update` of a batch, whose longest response has `limit` tokens; `seed` is that of the order of groups.

    Token weights are given, or found by a credit method, beside the update's forward pass if it can; without either all
    are 1. With `refreshes` they are replaced before each further step. Other options are those of `configured`.
    """
    objective, execution = configured(options)
    share = execution.share_prefixes
    services = opened(reference, continuations)
    context = context_for(policy, execution.token_budget, temperature=temperature, services=services)
    if credit is not None:
        clock = PhaseClock(policy.device)
        forward, given = assign_credit(credit, None, policy, batch, context, objective, clock, share_prefixes=share)
    else:
        given = weights if isinstance(weights, TokenWeights) else token_weights(batch, weights)
        entropy = objective.entropy_coefficient > 0
        forward = forward_of(policy, batch, context, share_prefixes=share, entropy_gradient=entropy)
    how = {"objective": objective, "execution": execution, "max_response_length": limit, "seed": seed}
    how["sampler_cap"] = resolve_cap(execution.sampler_cap, copies_weights=False)
    update = Update(forward, given, refreshes=refreshes, **how)
    update.compute_before_steps()
    return update


def whole_logs(policy, batch):
    """``[B, T, V]``: the log-probabilities before each response token, by the whole model on padded rows."""
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    return logits[:, -batch.response_mask.shape[1] - 1 : -1].log_softmax(-1)


def backward(loss, last):
    """The backward pass of a micro-batch without a strategy."""
    loss.backward()


def steps(policy, batch, share, reference=None, credit=None, **options):
    """Gradients and metrics of each optimiser step of two passes, and how many ids were embedded in them.

    With a credit method, the token weights that were used, too.
    """
    policy.train()
    assert policy.tree_kernel in ("sdpa", "varlen", None)  # It tries that once, with passes of its own.
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    embedded, found = 0, []

    def count(module, args, output):
        nonlocal embedded
        embedded += args[0].numel()

    hook = policy.model.get_input_embeddings().register_forward_hook(count)
    passes = {"num_iterations": 2, "share_prefixes": share}
    update = update_of(policy, batch, reference=reference, credit=credit, **passes | options)
    for number in range(len(update.steps)):
        policy.zero_grad()
        metrics = update.accumulate(number, backward).figures()
        found.append(({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, metrics))
        for p in policy.parameters():
            if p.grad is not None:
                p.data -= 1e-3 * p.grad
    hook.remove()
    for name, p in policy.named_parameters():
        p.data.copy_(start[name])
    return (found, embedded) if credit is None else (found, embedded, update.final_weights())


def sums(parameters):
    """One figure a tensor, of all of its entries in their order."""
    whole = [whole_tensor(p).double().flatten() for p in parameters]
    return [(w * torch.linspace(1, 2, len(w), dtype=torch.float64)).sum().item() for w in whole]


def largest_gap(ours, theirs):
    """The largest difference of a tensor as a share of its largest entry; RMS norms run in float32."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(
        (ours[name] - theirs[name]).abs().max().item() / max(theirs[name].abs().max().item(), 1e-12) for name in ours
    )


def gap(ours, theirs):
    """The largest difference of a parameter's gradient as a share of its length."""
    assert ours.keys() == theirs.keys()
    assert all(gradient.norm() > 0 for gradient in theirs.values())
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)

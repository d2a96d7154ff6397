"""Optimiser steps whose rows share what they begin with, or do not; and the KL terms to try."""

from grail_lightning.objective import Objective
from grail_lightning.rollout import Sampling
from grail_lightning.update import Update

KL = [{}] + [
    {"kl_coefficient": 0.1, "kl_estimator": name, "kl_corrected": corrected}
    for name in ("k1", "k2", "k3")
    for corrected in (True, False)
]
FEWER = {"shared_tokens": 0.0}  # What is meant to differ.


def steps(policy, batch, share, reference=None, shared=None, passes=2, **options):
    """Gradients and metrics of each optimiser step of some passes, and how many ids were embedded in them."""
    policy.train()
    objective = Objective(group_size=4, updates_per_batch=passes, share_prompts=share, **options)
    update = Update(policy, reference, batch, objective, Sampling(max_response_length=9), seed=0, shared=shared)
    start = {name: p.detach().clone() for name, p in policy.named_parameters()}
    embedded, found = 0, []

    def count(module, args, output):
        nonlocal embedded
        embedded += args[0].numel()

    hook = policy.model.get_input_embeddings().register_forward_hook(count)
    for rows in update.plan(batch.response_mask.double(), None):
        policy.zero_grad()
        metrics = update.accumulate(rows, lambda loss, last: loss.backward())
        found.append(({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, metrics))
        for p in policy.parameters():
            if p.grad is not None:
                p.data -= 1e-3 * p.grad
    hook.remove()
    for name, p in policy.named_parameters():
        p.data.copy_(start[name])
    return found, embedded


def gap(ours, theirs):
    """The largest difference of a parameter's gradient as a share of its length."""
    assert ours.keys() == theirs.keys()
    assert all(gradient.norm() > 0 for gradient in theirs.values())
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)

"""Log-probabilities under the weights from before the batch's first step: the denominators of the importance ratio.

These weights sampled the batch, except with `execution.sample_ahead`: the sampler then had those of the batch before,
for which `sampler_correction` corrects if `execution.sampler_cap` is set.

Shapes: ``B`` rows, ``T`` response tokens, ``b`` rows of a micro-batch with ``t`` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grail_lightning.functional.tokens import TokenStats
from grail_lightning.policy import Policy
from grail_lightning.policy.capabilities import has_dropout
from grail_lightning.policy.micro_batch import MicroBatch, scatter
from grail_lightning.step.plan import Plan


class OldLogprobs:
    """Old log-probabilities of each row, by one of three rules.

    *Same weights*: in the first optimiser step the policy still has its old weights. The log-probabilities of the pass
    itself, detached, are the old ones, and the ratio is 1. A batch with one optimiser step needs no other rule.

    *Recorded*: rows that the first step has scored have their log-probabilities recorded for later passes.

    *Computed before*: rows of later steps need their old log-probabilities before the first step changes the weights.
    With dropout and several steps this holds for all rows: the first step has dropout, but the sampler had none.

    Args:
        plan: The optimiser steps.
        policy: The policy that is trained.
    """

    def __init__(self, plan: Plan, policy: Policy) -> None:
        dtype = torch.promote_types(policy.model.dtype, torch.float32)
        self._values = torch.zeros(plan.mask.shape, dtype=dtype, device=plan.mask.device)
        self._known = torch.zeros(len(plan.mask), dtype=torch.bool)
        self._plan, self._dropout = plan, policy.training and has_dropout(policy)

    def rows_before(self) -> Tensor:
        """``[n]`` long: the rows whose log-probabilities have to be computed before the first of several steps."""
        live = self._plan.live.clone()
        if not self._dropout:
            live[self._plan.steps[0]] = False
        return live.nonzero().flatten()

    def computed_before(self, rows: Tensor, logprobs: Tensor) -> None:
        """Store log-probabilities ``[B, T]`` of some rows."""
        self._known[rows] = True
        at = rows.to(self._values.device)
        self._values[at] = logprobs[at].to(self._values.dtype)

    def of(self, micro: MicroBatch, stats: TokenStats) -> Tensor:
        """``[b, t]``: the old log-probabilities of a micro-batch, given its present ones (`stats`)."""
        if not self._are_known(micro):
            return stats.logprobs.detach()
        return self._values[micro.rows.to(self._values.device), : stats.logprobs.shape[1]]

    def record(self, micro: MicroBatch, stats: TokenStats) -> None:
        """Store the log-probabilities of rows that are scored for the first time, for later steps."""
        if not self._are_known(micro):
            scatter(self._values, micro.rows, stats.logprobs)
            self._known[micro.rows] = True

    def _are_known(self, micro: MicroBatch) -> bool:
        known = self._known[micro.rows]
        assert known.all() or not known.any(), "a micro-batch falls under one rule"
        return bool(known.all())

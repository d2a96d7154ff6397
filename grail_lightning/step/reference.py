"""Log-probabilities under the frozen reference policy, for the KL term.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, uniform_weights
from grail_lightning.policy import Policy
from grail_lightning.policy.reference import Reference
from grail_lightning.step.forward import Forward


def reference_logprobs(
    reference: Reference, trained: Policy, batch: RolloutBatch, rows: Tensor, context: CreditContext, *, share: bool
) -> Tensor:
    """``[B, T]`` log-probabilities of some rows under the reference of the policy `trained`, zero on the others."""
    with reference.running(trained) as policy:
        return Forward(policy, batch, context, uniform_weights(batch), share=share).logprobs_without_gradient(rows)

"""The frozen reference policy of the KL term.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.credit.base import CreditContext, uniform_weights
from grail_lightning.policy import Policy
from grail_lightning.step.forward import Forward


class Reference:
    """The policy before training: a frozen copy, or the trained policy without its adapters.

    This is no module, because Lightning would treat it as a part of the trained module and of its checkpoints.

    Args:
        policy: The frozen copy, or the policy with adapters.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def has_adapters(self) -> bool:
        """Whether it is the trained policy itself, with its adapters switched off."""
        return self.policy.loading.lora is not None

    def follow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move a frozen copy to the device and the dtype of the policy."""
        if not self.has_adapters:
            self.policy.to(device=device, dtype=dtype)

    def logprobs(self, batch: RolloutBatch, rows: Tensor, context: CreditContext, *, share: bool) -> Tensor:
        """``[B, T]`` log-probabilities of some rows, zero on the others."""
        forward = Forward(self.policy, batch, context, uniform_weights(batch), share=share)
        with self.policy.adapters_off() if self.has_adapters else nullcontext():
            return forward.frozen_logprobs(rows)

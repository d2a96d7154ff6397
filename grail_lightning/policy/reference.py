"""Weights that are frozen: those of the reference policy, and others for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from grail_lightning.policy.model import Policy


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

    @contextmanager
    def running(self, beside: Policy) -> Iterator[Policy]:
        """The policy that computes as the reference inside the context.

        A frozen copy that is not sharded is moved to the device and the dtype of the trained policy, `beside`.
        """
        if self.has_adapters:
            with self.policy.adapters_off():
                yield self.policy
            return
        if not isinstance(self.policy, FSDPModule):  # Moving a sharded one, even whole, would shard it again.
            self.policy.to(device=beside.device, dtype=beside.model.dtype)
        yield self.policy


@contextmanager
def requiring_grad(parameters: list[nn.Parameter], value: bool) -> Iterator[None]:
    """Set `requires_grad` of parameters to `value` inside the context; all must have the opposite value before."""
    for parameter in parameters:
        parameter.requires_grad_(value)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not value)

"""The reference policy: the policy before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from grail_lightning.core.policy.model import Policy


class Reference:
    """The policy before training: a frozen copy, or the trained policy without its adapters.

    This is no module, because Lightning would treat it as a part of the trained module and of its checkpoints.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._place: tuple[torch.device, torch.dtype] | None = None  # Where a frozen copy was moved.

    @property
    def has_adapters(self) -> bool:
        """Whether it is the trained policy itself."""
        return self.policy.has_adapters

    @contextmanager
    def running(self, beside: Policy) -> Iterator[Policy]:
        """The policy that computes as the reference inside the context.

        A frozen copy that is not sharded is moved to the device and the dtype of the trained policy, `beside`.
        """
        if self.has_adapters:
            with self.policy.adapters_off():
                yield self.policy
            return
        place = beside.device, beside.model.dtype
        # `to` visits every weight, and DGPO enters for each chunk of tokens. A sharded copy, even whole, would be
        # sharded again.
        if self._place != place and not isinstance(self.policy, FSDPModule):
            self.policy.to(*place)
            self._place = place
        yield self.policy

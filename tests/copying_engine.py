"""An engine with weights of its own: what a server does, in a thread of this process."""

import torch

from grail_lightning import HFEngine, RolloutEngine
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.collectives import whole_tensor


class _Alone(HFEngine):
    """Out of step with the other ranks, which have copies of their own."""

    _synchronised = False


class Elsewhere(RolloutEngine):
    """Copies the weights at each push, and samples with the copy, which has the architecture of `policy`."""

    copies_weights = samples_elsewhere = True

    def __init__(self, policy: str = "arithmetic") -> None:
        self._copy = load_policy(policy, trainable=False)
        self._engine = _Alone()
        self._engine.update_weights(self._copy)

    @torch.no_grad()
    def update_weights(self, policy):
        """Copy every weight; sharded ones are gathered one at a time."""
        self._device = policy.device
        for mine, theirs in zip(self._copy.parameters(), policy.parameters(), strict=True):
            mine.copy_(whole_tensor(theirs))

    def generate(self, prompts, group_size, sampling, seed):
        """As `HFEngine`."""
        return self._engine.generate(prompts, group_size, sampling, seed).to(self._device)

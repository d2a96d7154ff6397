"""Weights held in half precision, and the float32 copies of them that the optimiser moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grail_lightning.functional.tokens import gradient_so_far
from grail_lightning.ranks import over_ranks, world_size

HALF = (torch.bfloat16, torch.float16)
SAVED = "masters"


class Masters:
    """The master weights of a policy.

    In bfloat16 a step of less than 1/256 of a weight rounds to nothing, and so does a small addition to a gradient. So
    gradients are added up and steps are taken in float32; the policy holds the result, rounded.

    Args:
        weights: The trainable weights; those in full precision are their own masters.

    Attributes:
        parameters: What the optimiser gets, in the same order.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        weights = list(weights)
        self.parameters = [w.detach().float().requires_grad_() if w.dtype in HALF else w for w in weights]
        self._pairs = [(w, m) for w, m in zip(weights, self.parameters, strict=True) if w is not m]

    def collect(self) -> None:
        """After a backward pass: add the gradients to those of the masters, and free them."""
        for weight, master in self._pairs:
            if weight.grad is not None:
                gradient_so_far(master).add_(weight.grad)
                weight.grad = None

    def exchange(self) -> None:
        """Mean of the gradients over the ranks, each of which has its own so far."""
        for master in self.parameters:
            master.grad = over_ranks(gradient_so_far(master), "sum").div_(world_size())

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the policy."""
        for weight, master in self._pairs:
            weight.copy_(master)

    def follow(self, optimizer: Any) -> None:
        """Write back after each of the optimiser's steps, and travel in its checkpoints."""
        optimizer.register_step_post_hook(lambda *_: self.write_back())
        optimizer.register_state_dict_post_hook(lambda _, state: state | {SAVED: [m for _, m in self._pairs]})
        optimizer.register_load_state_dict_pre_hook(self._restore)

    @torch.no_grad()
    def _restore(self, _: Any, state: dict[str, Any]) -> dict[str, Any]:
        # A checkpoint of a run without masters has none: then they are the weights in it.
        saved = state.get(SAVED) or [weight for weight, _ in self._pairs]
        for (_, master), held in zip(self._pairs, saved, strict=True):
            master.copy_(held)
        self.write_back()
        return {name: value for name, value in state.items() if name != SAVED}

"""Master weights: float32 copies of weights in half precision, which the optimiser updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grail_lightning.functional.tokens import gradient_so_far
from grail_lightning.runtime.collectives import all_reduce, world_size

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The master weights of a policy.

    In bfloat16 a change of less than 1/256 of a weight is rounded away, and so is a small addition to a gradient.
    Gradients are therefore accumulated over micro-batches, and steps are taken, in float32; the policy holds the
    rounded result. Each gradient in half precision is freed as soon as it has been added.

    `weights` are the trainable ones by name; those in full precision are their own master weights. `restored` are those
    of a checkpoint, of which those in full precision initialise the master weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], restored: Mapping[str, Tensor]) -> None:
        self.by_name = {name: _master(weight, restored.get(name)) for name, weight in weights.items()}
        # Each weight in half precision with its master weight.
        self.pairs = [(w, m) for w, m in zip(weights.values(), self.by_name.values(), strict=True) if w is not m]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside the context, backward passes add each weight's gradient to its master weight as they compute it."""
        pairs: Any = self.pairs  # The method below has no types.
        hooks = [weight.register_post_accumulate_grad_hook(partial(_collect, master)) for weight, master in pairs]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def write_back(self, *_: object) -> None:
        """Round the master weights into the policy, as after each step of the optimiser."""
        for weight, master in self.pairs:
            weight.copy_(master)


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Average over the ranks the gradients that each rank has accumulated, one tensor after the other. A collective.

    DDP's own exchange would overlap with the backward pass, but in the dtype of the weights.
    """
    if world_size() == 1:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device)
    for parameter, somewhere in zip(parameters, all_reduce(has_gradient.long(), "max").tolist(), strict=True):
        if somewhere:
            parameter.grad = all_reduce(gradient_so_far(parameter), "sum").div_(world_size())


def _master(weight: Tensor, restored: Tensor | None) -> Tensor:
    if weight.dtype not in HALF:
        return weight
    begun = weight.detach()
    if restored is not None and restored.dtype not in HALF and restored.shape == weight.shape:
        begun = restored
    return nn.Parameter(begun.to(weight.device, torch.float32, copy=True))


def _collect(master: Tensor, weight: Tensor) -> None:
    if weight.grad is not None:
        gradient_so_far(master).add_(weight.grad)
        weight.grad = None

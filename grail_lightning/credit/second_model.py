"""What a credit method may ask of the run: a model beside the policy, trained with an optimiser of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grail_lightning.policy import Policy
from grail_lightning.policy.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Training:
    """The options of a second model.

    Attributes:
        model: A model as `model.policy` names it, with the policy's tokenizer; None is the policy before training.
        optimizer: A function from the trainable parameters to their optimiser.
        scheduler: A function from the optimiser to its schedule, which counts this model's steps; None has none.
    """

    model: str | None
    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any] | None = None


class SecondModel(ABC):
    """A model that is loaded as the policy is: with the same adapters, sharded alike. It is part of checkpoints."""

    @abstractmethod
    def beside(self, policy: Policy) -> Policy:
        """The model, on the device and in the dtype of the policy. Every rank must call it."""

    @abstractmethod
    def step(self, parts: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
        """Take an optimiser step. A collective: every rank must call it, with equally many parts.

        Args:
            parts: The micro-batches.
            loss: A function from a micro-batch to its summand of the loss. The losses of all ranks are added.

        Returns:
            The norm of the gradients before clipping, and the learning rate.
        """

"""How the gradients of an optimiser step's micro-batches add up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from grail_lightning.functional.tokens import gradient_so_far
from grail_lightning.policy.model import Policy


def prepare_accumulation(policy: Policy, strategy: Any) -> None:
    """Let the embeddings report the rows that they have read, not a gradient of the whole vocabulary.

    On one CPU: elsewhere hooks wait for gradients (DDP, FSDP), or the order in which rows are added up is open (CUDA).

    Args:
        policy: Before training.
        strategy: The trainer's.
    """
    embeddings = policy.model.get_input_embeddings()
    if (
        type(embeddings) is nn.Embedding
        and isinstance(strategy, SingleDeviceStrategy)
        and strategy.root_device.type == "cpu"
    ):
        embeddings.sparse = True


@contextmanager
def accumulating(policy: Policy, strategy: Any, *, last: bool) -> Iterator[None]:
    """The backward pass of a micro-batch, whose gradients are added to those of the others.

    Replicated weights (DDP): gradients stay on this rank, and those of a step travel once, with its last micro-batch.
    Sharded ones (FSDP): each micro-batch's are reduced into the shards at once, so that no rank ever holds whole
    gradients, which is what they are sharded for. On one device nobody waits for a gradient, and a second one of the
    whole vocabulary is never made.

    Args:
        policy: Whose gradients.
        strategy: The trainer's.
        last: Whether the micro-batch is the step's last.
    """
    embeddings, wrapped = policy.model.get_input_embeddings(), strategy.model
    if getattr(embeddings, "sparse", False) and embeddings.weight.requires_grad:
        gradient_so_far(embeddings.weight)  # Dense: optimisers and clipping take no other.
    policy.adds_up = isinstance(strategy, SingleDeviceStrategy)
    try:
        with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
            yield
    finally:
        policy.adds_up = False

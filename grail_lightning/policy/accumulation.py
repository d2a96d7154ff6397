"""How the gradients of an optimiser step's micro-batches add up, and what the optimiser gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grail_lightning.functional.tokens import gradient_so_far
from grail_lightning.policy.masters import HALF, Masters
from grail_lightning.policy.model import Policy


def make_optimizer(policy: Policy, strategy: Any, make: Callable[[Any], Any]) -> Any:
    """The optimiser of the trainable weights, or of their masters where they are held in half precision.

    On one CPU the embeddings report the rows that they have read from here on, not a gradient of the whole vocabulary.
    (Elsewhere hooks wait for gradients, as with DDP and FSDP, or the order in which rows are added up is open: CUDA.)

    Args:
        policy: On its device.
        strategy: The trainer's. Sharded weights (FSDP) have no masters: shard float32 ones.
        make: Parameters to optimiser.
    """
    halves = any(p.dtype in HALF for p in policy.trained_weights)
    if halves and policy.loading.master_weights and isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        policy.masters = Masters(policy.trained_weights)
    elif isinstance(strategy, SingleDeviceStrategy) and strategy.root_device.type == "cpu":
        embeddings = policy.model.get_input_embeddings()
        embeddings.sparse = isinstance(embeddings, nn.Embedding)
    optimizer = make(iter(policy.trained_weights))
    if policy.masters is not None:
        policy.masters.follow(optimizer)
    return optimizer


@contextmanager
def accumulating(policy: Policy, strategy: Any, *, last: bool) -> Iterator[None]:
    """The backward pass of a micro-batch, whose gradients are added to those of the others.

    Replicated weights (DDP): gradients stay on this rank, and those of a step travel once, with its last micro-batch.
    Sharded ones (FSDP2): each micro-batch's are reduced into the shards at once, so that no rank ever holds whole
    gradients, which is what they are sharded for; with `loading.reduce_once` they stay and travel as with DDP. On one
    device nobody waits for a gradient, and a second one of the whole vocabulary is never made.

    Args:
        policy: Whose gradients.
        strategy: The trainer's.
        last: Whether the micro-batch is the step's last.
    """
    embeddings, masters, wrapped = policy.model.get_input_embeddings(), policy.masters, strategy.model
    replicated = isinstance(wrapped, DistributedDataParallel)
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last or not policy.loading.reduce_once)
    if getattr(embeddings, "sparse", False) and embeddings.weight.requires_grad:
        gradient_so_far(embeddings.weight)  # Dense: optimisers and clipping take no other.
    policy.adds_up = isinstance(strategy, SingleDeviceStrategy) and masters is None
    try:
        with wrapped.no_sync() if replicated and (masters is not None or not last) else nullcontext():
            yield
        if masters is not None:
            masters.collect()
            if last and replicated:
                masters.exchange()
    finally:
        policy.adds_up = False

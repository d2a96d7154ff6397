"""How the gradients of an optimiser step's micro-batches add up, and what the optimiser gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grail_lightning.functional.tokens import gradient_so_far
from grail_lightning.policy.masters import HALF, Masters
from grail_lightning.policy.model import Policy


def make_optimizer(
    policy: Policy, strategy: Any, make: Callable[[Any], Any], restored: Mapping[str, Tensor] | None = None
) -> Any:
    """The optimiser of the trainable weights, or of their masters where they are held in half precision.

    On one CPU the embeddings report the rows that they have read from here on, not a gradient of the whole vocabulary.
    (Elsewhere hooks wait for gradients, as with DDP and FSDP, or the order in which rows are added up is open: CUDA.)

    Args:
        policy: On its device.
        strategy: The trainer's. Sharded weights (FSDP, DeepSpeed) have no masters here: shard float32 ones.
        make: Parameters to optimiser.
        restored: The policy's weights in a checkpoint, by name.
    """
    policy.masters = None  # Not those of a fit before this one.
    alone = isinstance(strategy, SingleDeviceStrategy)
    whole = alone or (isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy))
    if whole and policy.loading.master_weights and any(p.dtype in HALF for p in policy.trained_weights):
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        policy.masters = Masters(trained, restored or {})
    embeddings = policy.model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        plain = embeddings.weight.dtype not in HALF and not embeddings.scale_grad_by_freq
        embeddings.sparse = alone and strategy.root_device.type == "cpu" and plain
    optimizer = make(iter(policy.trained_weights))
    if policy.masters is not None:
        policy.masters.follow(optimizer)
    return optimizer


def plain_gradients(policy: Policy) -> None:
    """Undo what `make_optimizer` did to the embeddings: loops other than ours, and clipping, want dense gradients."""
    embeddings = policy.model.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.sparse = False


def master_weights(policy: Policy | None, prefix: str) -> dict[str, Tensor]:
    """The masters of weights in half precision by name, for a checkpoint: it holds them in the weights' place.

    They outlive their fit, so that a checkpoint saved afterwards has all digits. A master that the weight is no longer
    the rounding of (other weights were loaded, say) has nothing to say about it.
    """
    if policy is None or policy.masters is None:
        return {}
    pairs = policy.masters.pairs
    exact = {id(w): m.detach() for w, m in pairs if torch.equal(w.detach(), m.detach().to(w.device, w.dtype))}
    everything = policy.named_parameters(remove_duplicate=False)  # Tied weights have several names.
    return {prefix + name: exact[id(p)] for name, p in everything if id(p) in exact}


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
    collected = nullcontext() if masters is None else masters.collecting()
    try:
        with collected, wrapped.no_sync() if replicated and (masters is not None or not last) else nullcontext():
            yield
        if masters is not None and last and replicated:
            masters.exchange()
    finally:
        policy.adds_up = False

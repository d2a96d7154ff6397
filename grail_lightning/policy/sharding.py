"""Fully sharded policies (FSDP2): what to do so that their parts can be used outside `Policy.forward`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from grail_lightning.policy.model import Policy


def shard(policy: Policy, mesh: Any) -> Policy:
    """Shard every decoder block and then the rest over a device mesh, in place.

    Args:
        policy: Loaded, on any device.
        mesh: The data-parallel mesh that `ModelParallelStrategy` gives to `configure_model`.
    """
    for block in policy.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    # FSDP2 sets itself up in the first forward pass, which must be the root's; sampling would begin with a block's.
    ids = torch.zeros(1, 2, dtype=torch.long, device=policy.device)
    with torch.no_grad(), policy.eager_attention():
        policy(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool, device=ids.device))
    return policy


@contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """All weights whole on every rank for a while: sampling and saliency use parts of the policy on their own.

    Between decoding steps nothing is gathered again, so ranks that sample different lengths cannot wait for each other
    in a collective. Does nothing for a policy that is not sharded. Every rank must come here.
    """
    units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)  # Saliency runs backward passes, one a micro-batch.
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            # FSDP2's own defaults: blocks are resharded after their forward pass, the root is not.
            unit.set_reshard_after_forward(unit is not units[0], recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


@contextmanager
def unsynchronised(wrapped: Any) -> Iterator[None]:
    """Keep the gradients of a backward pass on this rank: those of a step travel once, with its last micro-batch.

    For replicated weights (DDP). Sharded ones (FSDP) are left alone: each micro-batch's gradients are reduced into the
    shards at once, so that no rank ever holds whole gradients, which is what they are sharded for.

    Args:
        wrapped: The strategy's wrapper around the module.
    """
    with wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext():
        yield

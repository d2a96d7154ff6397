"""Fully sharded policies (FSDP2): sharding, and access to whole weights outside `Policy.forward`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading, PolicySource
from grail_lightning.core.policy.vision import PictureTokens
from grail_lightning.core.runtime.collectives import whole_tensor

Running = Callable[[], AbstractContextManager[object]]


def check_strategy(strategy: object) -> None:
    """Refuse FSDP1, given as an object or by its name.

    It runs a training step inside its root's forward pass, where our backward passes cannot run.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if isinstance(strategy, FSDPStrategy) or name.lower().rpartition(".")[2] in ("fsdpstrategy", "fsdp_cpu_offload"):
        raise ValueError(
            f"`trainer.strategy` must not be FSDP1, but got {name}. Take FSDP2: "
            "`--trainer.strategy=ModelParallelStrategy`."
        )


def shard(policy: Policy, mesh: DeviceMesh, running: Running = nullcontext) -> Policy:
    """Shard every decoder block, and then the other weights, over a data-parallel mesh, in place.

    `running` gives the context in which the policy will run, such as autocast.
    """
    # These tests run while weights are whole: if the model raises, no rank waits for the others in a collective. The
    # kernel of prefix trees depends on the dtype in which the blocks compute.
    with running():
        _ = policy.tree_kernel, policy.supports_kv_continuation, policy.compiled_blocks
    for block in policy.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    # FSDP2 initialises itself in the first forward pass, which must be the root's; sampling would start with a block.
    ids = torch.zeros(1, 2, dtype=torch.long, device=policy.device)
    valid = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad(), policy.eager_attention():
        policy(padded_layout(ids, valid, valid[:, 1:]), decode=partial(policy.decode, compiled=False))
    return policy


def load_on_ranks(
    name: PolicySource,
    loading: Loading,
    mesh: DeviceMesh | None,
    *,
    half_precision: bool,
    trainable: bool,
    pictures: PictureTokens | None = None,
    running: Running = nullcontext,
) -> Policy:
    """Load a policy as each rank of a run holds it: in its mode, and sharded if the strategy has a device mesh.

    `running` gives the context of the run's precision; see `shard`.
    """
    # Lightning's default makes all devices of a node share the same rows, and expects the layers to be split.
    if mesh is not None and (sharing := mesh["tensor_parallel"].size()) > 1:
        raise ValueError(
            f"`tensor_parallel_size` must be 1, since layers are never split, but got {sharing}. "
            f"Set `ModelParallelStrategy(data_parallel_size={mesh.size()}, tensor_parallel_size=1)`."
        )
    policy = load_policy(name, loading, half_precision=half_precision, trainable=trainable, pictures=pictures)
    policy.train(trainable)  # `from_pretrained` sets evaluation mode, in which blocks are not checkpointed.
    return policy if mesh is None else shard(policy, mesh["data_parallel"], running)


@contextmanager
def gathered(policy: Policy) -> Iterator[None]:
    """Whole weights on every rank inside the context: sampling and saliency call parts of the policy directly.

    Weights are not gathered again between decoding steps, so ranks that sample different lengths do not wait for each
    other. A policy that is not sharded is unchanged. A collective: every rank must call it.
    """
    units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)  # Saliency runs one backward pass a micro-batch.
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            # FSDP2's own defaults: blocks are resharded after their forward pass, the root is not.
            unit.set_reshard_after_forward(unit is not units[0], recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        if units:
            # Ranks may have made unequal numbers of passes. FSDP2 keeps the order of its forward passes until a
            # backward pass, which gathers blocks in advance by it: a rank with other blocks would wait for ever.
            units[0].reset_iter_state()


def weights_digest(policy: Policy) -> str:
    """The SHA-256 of all weights with their names, types and shapes.

    It does not depend on the number of ranks, nor on the device. Sharded weights are gathered one at a time: a
    collective, which every rank must call.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(policy.state_dict().items()):
        values = whole_tensor(weight).cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

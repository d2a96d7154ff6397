"""Fully sharded policies (FSDP2): what to do so that their parts can be used outside `Policy.forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from grail_lightning.policy.model import Policy
from grail_lightning.policy.options import Loading
from grail_lightning.policy.trees import can_branch


def check_strategy(strategy: Any) -> None:
    """Whether a policy can train under a strategy of Lightning's, which may also be given by its name.

    Raises:
        ValueError: For FSDP1, which runs a training step inside its root's forward pass: none of the backward passes
            of ours may lie there.
    """
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if isinstance(strategy, FSDPStrategy) or name.lower().rpartition(".")[2] in ("fsdpstrategy", "fsdp_cpu_offload"):
        raise ValueError(
            f"`trainer.strategy` must not be FSDP1, but got {name}. Take FSDP2: "
            "`--trainer.strategy=ModelParallelStrategy`, with `--model.loading.offload=true` for weights on the host."
        )


def data_parallel_mesh(mesh: Any, loading: Loading) -> Any:
    """The part of a strategy's device mesh to shard over; None if there is no mesh.

    Args:
        mesh: What `ModelParallelStrategy` gives to a module; None with other strategies.
        loading: How the policy is going to be loaded.

    Raises:
        ValueError: If weights are to stay on the host and there is no mesh, or its process group takes no host tensors;
            or if devices are to share layers.
    """
    if mesh is None:
        if loading.offload:
            raise ValueError(
                "`loading.offload` must be off where weights are not sharded, but got true without a device mesh. "
                "Set `--trainer.strategy=ModelParallelStrategy`, which one device is enough for, or leave it off."
            )
        if loading.reduce_once:
            rank_zero_warn(
                "`loading.reduce_once` changes nothing where gradients are not sharded. Set "
                "`--trainer.strategy=ModelParallelStrategy`, or leave it off."
            )
        return None
    if (sharing := mesh["tensor_parallel"].size()) > 1:
        raise ValueError(
            f"`tensor_parallel_size` must be 1, since layers are never split, but got {sharing}. "
            f"Set `ModelParallelStrategy(data_parallel_size={mesh.size()}, tensor_parallel_size=1)`."
        )
    mesh = mesh["data_parallel"]
    backend = torch.distributed.get_backend_config(mesh.get_group())
    if loading.offload and "cpu:" not in backend:
        raise ValueError(
            "`process_group_backend` must serve the CPU, too, with `loading.offload`, since norms of gradients are "
            f"summed up there, but got {backend!r}. "
            f"Set `--trainer.strategy.init_args.process_group_backend=cpu:gloo,{backend}`."
        )
    return mesh


def shard(policy: Policy, mesh: Any) -> Policy:
    """Shard every decoder block and then the rest over a device mesh, in place.

    Args:
        policy: Loaded, on any device; its `loading.offload` decides whether the shards lie there or on the host.
        mesh: The data-parallel mesh that `ModelParallelStrategy` gives to `configure_model`.
    """
    with policy.evaluating():
        can_branch(policy)  # Tried while weights are whole: should the model refuse, no rank is left in the middle.
    offload = OffloadPolicy()
    if policy.loading.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        policy.compute_device = _device(mesh)
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(policy, mesh=mesh, offload_policy=offload)
    if policy.loading.offload:
        _stay(policy)
    # FSDP2 sets itself up in the first forward pass, which must be the root's; sampling would begin with a block's.
    ids = torch.zeros(1, 2, dtype=torch.long, device=policy.device)
    with torch.no_grad(), policy.eager_attention():
        policy(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool, device=ids.device))
    return policy


def _device(mesh: Any) -> torch.device:
    """The one of this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _stay(policy: Policy) -> None:
    """From here on `Module.to` changes types and moves nothing: Lightning sends whole modules to the device."""
    convert: Any = policy._apply

    def stay(change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def changed(tensor: Tensor) -> Tensor:
            return tensor.to(change(torch.empty(0, dtype=tensor.dtype, device="cpu")).dtype)

        return convert(changed, recurse)

    policy._apply = stay  # type: ignore[method-assign]


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

"""The gradients of an optimiser step, accumulated over micro-batches, and the (master) weights that it updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer

from grail_lightning.core.functional.tokens import gradient_so_far
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.runtime.collectives import all_reduce, whole_tensor, world_size

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


def _average_gradients(parameters: Sequence[Tensor]) -> None:
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


def _fuse(optimizer: Optimizer) -> None:
    """Let Adam and AdamW update weights on CUDA by kernels that read each number once.

    Torch's own default there, `foreach`, takes a dozen kernels and a temporary of the size of the weights.
    """
    for group in optimizer.param_groups if type(optimizer) in (Adam, AdamW) else ():
        chosen = group["fused"] is not None or group["foreach"] is not None or group["differentiable"]
        if not chosen and all(weight.device.type == "cuda" for weight in group["params"]):
            group["fused"] = True


class Gradients:
    """The gradients of a policy under a strategy of Lightning.

    Weights in half precision get float32 master weights. On a single CPU the embeddings have sparse gradients, which
    contain only the rows that were read. They are dense elsewhere: with DDP and FSDP hooks read the gradients, and on
    CUDA the order of summation is not deterministic.

    Sharded weights (FSDP, DeepSpeed) get no master weights: shard float32 ones. `restored` are the policy's weights in
    a checkpoint, by name. A policy `apart` is the second model of a credit method: it is no part of the module that the
    strategy wraps, so that DDP does not reduce its gradients.
    """

    def __init__(
        self,
        policy: Policy,
        strategy: Strategy,
        restored: Mapping[str, Tensor] | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.policy, self.strategy, self.apart = policy, strategy, apart
        alone = isinstance(strategy, SingleDeviceStrategy)
        whole = alone or (isinstance(strategy, DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy))
        trained: dict[str, Tensor] = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        half = policy.loading.master_weights and any(p.dtype in HALF for p in trained.values())
        self.masters = MasterWeights(trained, restored or {}) if whole and half else None
        self.by_name = trained if self.masters is None else self.masters.by_name
        embeddings = policy.model.get_input_embeddings()
        if isinstance(embeddings, nn.Embedding):
            plain = embeddings.weight.dtype not in HALF and not embeddings.scale_grad_by_freq
            embeddings.sparse = alone and strategy.root_device.type == "cpu" and plain

    @property
    def weights(self) -> list[Tensor]:
        """The tensors that the optimiser updates: the weights that need a gradient, or their master weights."""
        return list(self.by_name.values())

    @property
    def in_place(self) -> bool:
        """Whether a backward pass may add the head's gradient to `weight.grad` in place, since no hook reads it."""
        return isinstance(self.strategy, SingleDeviceStrategy) and self.masters is None

    def make_optimizer(self, make: Callable[[Iterator[Tensor]], Optimizer]) -> Optimizer:
        """An optimiser of `weights`. After each of its steps, master weights are rounded into the policy.

        On CUDA `torch.optim.Adam` and `AdamW` are fused unless their options say something else.
        """
        optimizer = make(iter(self.weights))
        _fuse(optimizer)
        if self.masters is not None:
            optimizer.register_step_post_hook(self.masters.write_back)
        return optimizer

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """A context for the backward pass of a micro-batch, whose gradients are added to those of the others.

        Replicated weights (DDP): gradients stay on the rank and are reduced once a step, with its last micro-batch;
        those of master weights after it, in float32.
        Sharded weights (FSDP2): the gradients of each micro-batch are reduced into the shards at once, so that no rank
        holds whole gradients; with `loading.reduce_once` they stay on the rank and are reduced as with DDP.
        """
        embeddings, wrapped = self.policy.model.get_input_embeddings(), self.strategy.model
        replicated = wrapped if isinstance(wrapped, DistributedDataParallel) and not self.apart else None
        if isinstance(self.policy, FSDPModule):
            self.policy.set_requires_gradient_sync(last or not self.policy.loading.reduce_once)
        if getattr(embeddings, "sparse", False) and embeddings.weight.requires_grad:
            gradient_so_far(embeddings.weight)  # A dense gradient, as optimisers and clipping require.
        collected = nullcontext() if self.masters is None else self.masters.collecting()
        without_reduction = self.masters is not None or not last
        with collected, replicated.no_sync() if replicated is not None and without_reduction else nullcontext():
            yield
        sharded = isinstance(self.policy, FSDPModule)
        # What DDP has not reduced: the gradients of master weights, and of a policy that DDP does not wrap.
        if last and not sharded and (self.apart or (self.masters is not None and replicated is not None)):
            _average_gradients(self.weights)

    def clip(self, max_norm: float | None) -> float:
        """Scale the gradients down to a norm; returns the norm before. None only measures."""
        limit = float("inf") if max_norm is None else max_norm
        return float(whole_tensor(torch.nn.utils.clip_grad_norm_(self.weights, limit)))

    def exact_weights(self, prefix: str) -> dict[str, Tensor]:
        """Master weights by name, which replace the rounded weights in a checkpoint.

        A master weight is left out if the policy's weight is not its rounded value: other weights were then loaded.
        """
        if self.masters is None:
            return {}
        pairs = self.masters.pairs
        exact = {id(w): m.detach() for w, m in pairs if torch.equal(w.detach(), m.detach().to(w.device, w.dtype))}
        everything = self.policy.named_parameters(remove_duplicate=False)  # Tied weights have several names.
        return {prefix + name: exact[id(p)] for name, p in everything if id(p) in exact}

    def release(self) -> None:
        """Give the embeddings dense gradients again, as other training loops expect."""
        embeddings = self.policy.model.get_input_embeddings()
        if isinstance(embeddings, nn.Embedding):
            embeddings.sparse = False

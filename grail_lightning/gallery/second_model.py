"""A model that is trained beside the policy: a service of credit methods such as `PRIME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from grail_lightning.core.credit.service import RunParts, Service
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.policy.micro_batch import MicroBatch
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import Loading, PolicySource, load_tokenizer, read_config
from grail_lightning.core.policy.vision import takes_pictures
from grail_lightning.core.runtime.collectives import rank, whole_tensor, world_size
from grail_lightning.core.runtime.seeds import derive_seed, run_seed, seeded
from grail_lightning.core.step.optimizer import ConfiguredOptions, check_optimizer, take_step


@dataclass(frozen=True, kw_only=True)
class ModelTraining:
    """The options of a model that is trained beside the policy.

    Attributes:
        model: The model that it begins as, with the tokenizer of the policy; None is the policy before training.
        optimizer: A function from the trainable parameters to the optimiser.
        scheduler: A function from the optimiser to the schedule; None is a constant rate.
    """

    model: str | None
    optimizer: Callable[[Any], Any]
    scheduler: Callable[[Any], Any] | None = None


class TrainsModel(Protocol):
    """An owner of a `TrainedModel`."""

    @property
    def training(self) -> ModelTraining:
        """The options of its model."""


class _Optimisation(NamedTuple):
    """What the first use of a second model makes, when the strategy has placed the policy."""

    gradients: Gradients
    optimizer: Optimizer
    scheduler: Any
    options: ConfiguredOptions


class TrainedModel(Service):
    """A model that is loaded as the policy is, with the same adapters and sharded alike, and trained by its owner.

    The owner has its options as `training`, a `ModelTraining`. Lightning's strategy knows nothing of the model. Its
    first use makes the optimiser, and restores the state of a checkpoint. Gradients of replicated weights are
    averaged over ranks here. The state is whole in checkpoints, gathered tensor by tensor if the weights are sharded.
    """

    trains_model = True

    def __init__(
        self, policy: Policy, training: ModelTraining, strategy: Strategy, max_grad_norm: float | None
    ) -> None:
        self.policy, self.training, self.strategy, self.max_grad_norm = policy, training, strategy, max_grad_norm
        self.steps = 0  # The number of optimiser steps taken.
        self._optimisation: _Optimisation | None = None
        self._restored: Mapping[str, Any] = {}

    @classmethod
    def check(cls, owner: TrainsModel, source: PolicySource, loading: Loading) -> None:
        """Check the optimiser, and that another model has the policy's tokens."""
        training, trusted = owner.training, loading.trust_remote_code
        try:
            check_optimizer(training.optimizer, training.scheduler)
        except ValueError as error:
            raise ValueError(f"`model.credit`: {error}") from error
        if training.model is None:
            return
        read_config(training.model, trusted, "model.credit.model")  # It says what is wrong with the name.
        if takes_pictures(source, trusted):
            raise ValueError(
                "`model.credit.model` must be null with a policy that takes pictures, which it then copies."
            )
        ours, theirs = (load_tokenizer(name, trusted).get_vocab() for name in (source, training.model))
        if ours != theirs:
            raise ValueError(
                f"`model.credit.model` must have the tokens of the policy {source!r}, but got {training.model!r}, "
                "which has others. Take a model with the same tokenizer, or null."
            )

    @classmethod
    def open(cls, owner: TrainsModel, run: RunParts) -> Self:
        """Load the model."""
        model = run.load_model(owner.training.model or run.source, trainable=True)
        return cls(model, owner.training, run.strategy, run.max_grad_norm)

    def beside(self, policy: Policy) -> Policy:
        """The model, on the device and in the dtype of the policy. Every rank must call it."""
        if self._optimisation is None and not isinstance(self.policy, FSDPModule):
            self.policy.to(device=policy.device, dtype=policy.model.dtype)
        self._opened()
        return self.policy

    def step(self, parts: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
        """Take an optimiser step. A collective: every rank must call it, with equally many micro-batches.

        `loss` gives each micro-batch's summand of the loss; those of all ranks are added. Returns the norm of the
        gradients before clipping, and the learning rate. Gradients that are not finite are an error, before any weight
        has changed.
        """
        gradients, optimizer, scheduler, _ = self._opened()
        self._reshard()
        with torch.enable_grad(), seeded(self.policy.device, self._seed("second model", rank())):
            for number, micro in enumerate(parts, start=1):
                summand = loss(micro) * world_size()  # Reductions average.
                with gradients.accumulating(last=number == len(parts)):
                    summand.backward()  # type: ignore[no-untyped-call]
        try:
            figures = take_step(gradients, optimizer, self.max_grad_norm, seed=self._seed("second optimizer"))
        except ValueError as error:
            raise ValueError(f"The model that `model.credit` trains: {error}") from error
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser and schedule as plain values. A collective; if sharded, the first rank has them."""
        if self._optimisation is None:
            return dict(self._restored)
        gradients, optimizer, scheduler, _ = self._optimisation
        self._reshard()
        weights = {name: whole_tensor(weight).cpu() for name, weight in gradients.by_name.items()}
        state = optimizer.state_dict()
        moments = _of_tensors(state["state"], lambda _, value: whole_tensor(value).cpu())
        if isinstance(self.policy, FSDPModule) and rank():
            return {}
        return {
            "steps": self.steps,
            "weights": weights,
            "optimizer": state | {"state": moments},
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, when the model is next used; of an empty one the optimiser begins anew."""
        self._restored, self._optimisation = state, None

    def _opened(self) -> _Optimisation:
        if self._optimisation is None:
            self._reshard()
            gradients = Gradients(self.policy, self.strategy, apart=True)
            optimizer, make_schedule = gradients.make_optimizer(self.training.optimizer), self.training.scheduler
            options = ConfiguredOptions(optimizer, make_schedule)  # Before the schedule writes into them.
            scheduler = None if make_schedule is None else make_schedule(optimizer)
            optimisation, self.steps = _Optimisation(gradients, optimizer, scheduler, options), 0
            if self._restored:
                self._restore(optimisation, self._restored)
            self._optimisation, self._restored = optimisation, {}
        return self._optimisation

    @torch.no_grad()
    def _restore(self, optimisation: _Optimisation, state: Mapping[str, Any]) -> None:
        gradients, optimizer, scheduler, options = optimisation
        weights = gradients.by_name
        if weights.keys() != state["weights"].keys():
            raise ValueError(
                "`ckpt_path` must hold the model that `model.credit` trains, but its weights have other names. Set "
                "`model.credit.model` and `model.loading.lora` to what they were, or begin anew."
            )
        for name, weight in weights.items():
            weight.copy_(_like(weight, state["weights"][name]))
        if gradients.masters is not None:
            gradients.masters.write_back()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = _of_tensors(state["optimizer"]["state"], lambda index, value: _like(parameters[index], value))
        optimizer.load_state_dict(state["optimizer"] | {"state": moments})
        self.steps = state["steps"]
        options.apply(optimizer, scheduler, self.steps)

    def _seed(self, purpose: str, *more: int) -> int:
        return derive_seed(run_seed(), purpose, self.steps, *more)

    def _reshard(self) -> None:
        """Leave each rank with its shards.

        After a forward pass FSDP2 keeps the root's weights whole. Those of a pass with frozen weights need no gradient,
        and the next pass would use them as they are.
        """
        for unit in self.policy.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _of_tensors(
    state: Mapping[int, Mapping[str, object]], change: Callable[[int, Tensor], Tensor]
) -> dict[int, dict[str, object]]:
    """An optimiser's state with `change` applied to the parameter's index and each of its tensors."""
    return {
        index: {name: change(index, value) if isinstance(value, Tensor) else value for name, value in tensors.items()}
        for index, tensors in state.items()
    }


def _like(weight: Tensor, value: Tensor) -> Tensor:
    """A whole tensor of a weight's shape, sharded as the weight is; a tensor of another shape unchanged."""
    if not isinstance(weight, DTensor) or value.shape != weight.shape:
        return value
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)

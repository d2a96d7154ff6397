"""A model that is trained beside the policy for a credit method: its optimiser, its gradients, its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from grail_lightning.credit.base import SecondModel, Training
from grail_lightning.distributed.gradients import Gradients
from grail_lightning.policy import Policy
from grail_lightning.policy.micro_batch import MicroBatch
from grail_lightning.policy.options import PolicySource, read_config
from grail_lightning.policy.tokenizer import load_tokenizer
from grail_lightning.runtime.collectives import rank, whole_tensor, world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed, seeded
from grail_lightning.step.optimizer import check_optimizer, configured_options, keep_options, option_record


def check_training(training: Training | None, policy: PolicySource, *, trust_remote_code: bool) -> None:
    """Check the optimiser of the model that a credit method trains, and that another model has the policy's tokens."""
    if training is not None:
        try:
            check_optimizer(training.optimizer, training.scheduler)
        except ValueError as error:
            raise ValueError(f"`model.credit`: {error}") from error
    if training is None or training.model is None:
        return
    read_config(training.model, trust_remote_code)  # It says what is wrong with the name.
    ours, theirs = (load_tokenizer(name, trust_remote_code).get_vocab() for name in (policy, training.model))
    if ours != theirs:
        raise ValueError(
            f"`model.credit.model` must have the tokens of the policy {policy!r}, but got {training.model!r}, "
            "which has others. Take a model with the same tokenizer, or null."
        )


class TrainedModel(SecondModel):
    """A second model under a strategy of Lightning, which knows nothing of it.

    Its first use makes the optimiser, and restores the state of a checkpoint. `max_grad_norm` None only measures.
    """

    def __init__(self, policy: Policy, training: Training, strategy: Strategy, max_grad_norm: float | None) -> None:
        self.policy, self.training, self.strategy, self.max_grad_norm = policy, training, strategy, max_grad_norm
        self._optimisation: _Optimisation | None = None
        self._restored: Mapping[str, Any] = {}

    @property
    def steps(self) -> int:
        """The number of optimiser steps taken; 0 before the first use."""
        return 0 if self._optimisation is None else self._optimisation.steps

    def beside(self, policy: Policy) -> Policy:
        """See `SecondModel.beside`."""
        if self._optimisation is None and not isinstance(self.policy, FSDPModule):
            self.policy.to(device=policy.device, dtype=policy.model.dtype)
        self._opened()
        return self.policy

    def step(self, parts: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
        """See `SecondModel.step`. An error before any weight has changed if the gradients are not finite."""
        return self._opened().step(parts, loss, self.max_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser and schedule as plain values. A collective; if sharded, the first rank has them."""
        return dict(self._restored) if self._optimisation is None else self._optimisation.state_dict()

    def tensors(self) -> list[Tensor]:
        """The tensors of `state_dict`, on every rank and without gathering: weights, and the optimiser's state."""
        if self._optimisation is None:
            return []
        weights, states = self._optimisation.gradients.weights, self._optimisation.optimizer.state.values()
        return [*weights, *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, when the model is next used; an empty one changes nothing."""
        if state:
            self._restored, self._optimisation = state, None

    def _opened(self) -> _Optimisation:
        if self._optimisation is None:
            self._optimisation = _Optimisation(self.policy, self.training, self.strategy, self._restored)
            self._restored = {}
        return self._optimisation


class _Optimisation:
    """The gradients of a second model, its optimiser and its schedule.

    Gradients of replicated weights are averaged over ranks here, and the state is whole in checkpoints, gathered tensor
    by tensor on the first rank if the weights are sharded.
    """

    def __init__(self, policy: Policy, training: Training, strategy: Strategy, restored: Mapping[str, Any]) -> None:
        self.policy, self.training, self.steps = policy, training, 0
        self._reshard()
        self.gradients = Gradients(policy, strategy, apart=True)
        self.optimizer = self.gradients.make_optimizer(training.optimizer)
        self.options = configured_options(self.optimizer)
        self.scheduler = None if training.scheduler is None else training.scheduler(self.optimizer)
        if restored:
            self._restore(restored)

    def step(
        self, parts: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor], max_grad_norm: float | None
    ) -> dict[str, float]:
        """See `TrainedModel.step`."""
        self._reshard()
        seed = derive_seed(run_seed(), "second model", self.steps, rank())
        with torch.enable_grad(), seeded(self.policy.device, seed):
            for number, micro in enumerate(parts, start=1):
                summand = loss(micro) * world_size()  # Reductions average.
                with self.gradients.accumulating(last=number == len(parts)):
                    summand.backward()  # type: ignore[no-untyped-call]
        norm = self.gradients.clip(max_grad_norm)
        figures = {"grad_norm": norm, "learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if not math.isfinite(norm):
            raise ValueError(
                f"The gradients of the model that `model.credit` trains must be finite, but their norm is {norm} at "
                f"learning rate {figures['learning_rate']:g}. This step was not taken: resume from the last checkpoint "
                "with a lower `model.credit.optimizer.lr`."
            )
        with seeded(self.policy.device, derive_seed(run_seed(), "second optimizer", self.steps)):
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return figures

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `TrainedModel.state_dict`."""
        self._reshard()
        weights = {name: whole_tensor(weight).cpu() for name, weight in self._weights().items()}
        optimizer = self.optimizer.state_dict()
        moments = _of_tensors(optimizer["state"], lambda _, value: whole_tensor(value).cpu())
        if isinstance(self.policy, FSDPModule) and rank():
            return {}
        return {
            "steps": self.steps,
            "weights": weights,
            "optimizer": optimizer | {"state": moments},
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "configured": option_record(self.options, self.training.scheduler),
        }

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Any]) -> None:
        weights = self._weights()
        if weights.keys() != state["weights"].keys():
            raise ValueError(
                "`ckpt_path` must hold the model that `model.credit` trains, but its weights have other names. Set "
                "`model.credit.model` and `model.loading.lora` to what they were, or begin anew."
            )
        for name, weight in weights.items():
            weight.copy_(_like(weight, state["weights"][name]))
        if self.gradients.masters is not None:
            self.gradients.masters.write_back()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = _of_tensors(state["optimizer"]["state"], lambda index, value: _like(parameters[index], value))
        self.optimizer.load_state_dict(state["optimizer"] | {"state": moments})
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["steps"]
        options = self.options, self.training.scheduler, state["configured"], self.steps
        keep_options(self.optimizer, self.scheduler, *options)

    def _weights(self) -> dict[str, Tensor]:
        """What the optimiser updates, by the names of the model's weights."""
        if self.gradients.masters is not None:
            return dict(self.gradients.masters.by_name)
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

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

"""The optimiser's step, and the options of the optimiser and its schedule after a resume."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from grail_lightning.core.distributed.gradients import HALF, Gradients
from grail_lightning.core.runtime.seeds import seeded


def check_optimizer(make: Callable[[Any], Optimizer], schedule: Callable[[Any], Any] | None = None) -> None:
    """Make the optimiser and its schedule for a matrix, so that torch checks their options before a model is loaded."""
    option = "optimizer"
    try:
        optimizer = trial_optimizer(make)
        inspect.signature(optimizer.step).bind()
        if schedule is not None:
            option = "scheduler"
            inspect.signature(schedule(optimizer).step).bind()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{option}` cannot be used: {str(error).rstrip('.')}. Correct its options.") from error


def trial_optimizer(make: Callable[[Any], Optimizer]) -> Optimizer:
    """The optimiser of a matrix and, if it accepts one, of a vector."""
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    try:
        return make(iter([matrix, vector]))
    except (TypeError, ValueError):  # Some accept no vectors.
        return make(iter([matrix]))


def take_step(
    gradients: Gradients, optimizer: Optimizer, max_norm: float | None, *, seed: int, warn_if_unmoved: bool = False
) -> dict[str, float]:
    """Clip the gradients to `max_norm` (None only measures), take a step, and return the norm and the learning rate.

    Without gradients (no live row) the step changes nothing, but counts, so that a run without a learning signal ends.
    `seed` is that of what the optimiser draws, such as stochastic rounding. All ranks pass the same one, since they
    must round replicated weights alike. `warn_if_unmoved` warns if the step changes no weight although gradient norm
    and learning rate are positive, which the logged figures would not show.
    """
    norm, rate = gradients.clip(max_norm), float(optimizer.param_groups[0]["lr"])
    # Before any weight has changed. All ranks have the same norm and raise.
    if not math.isfinite(norm):
        raise ValueError(
            f"`grad_norm` must be finite, but got {norm} at learning rate {rate:g}. This step was "
            "not taken, and the last checkpoint (if any) is unchanged: resume from it with a lower learning rate or "
            "`execution.max_grad_norm`. If the error occurs again at once, look at rewards and token weights, try "
            "`loading.dtype: float32`, or find its origin with `--trainer.detect_anomaly=true`."
        )
    watched = gradients.weights if warn_if_unmoved and norm > 0 and rate > 0 else []
    before = [_first_entries(weight) for weight in watched]
    with seeded(gradients.weights[0].device, seed):
        optimizer.step()
    if watched and all(torch.equal(old, _first_entries(w)) for old, w in zip(before, watched, strict=True)):
        rank_zero_warn(
            f"No parameter moved in a step with gradient norm {norm:.3g} and learning rate {rate:.3g}: "
            f"{explain_stuck_weights(watched)}"
        )
    return {"grad_norm": norm, "learning_rate": rate}


def _first_entries(weight: Tensor) -> Tensor:
    """A copy of the first few entries; of this rank's shard if the weight is sharded."""
    local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.detach().flatten()[:4096].clone()


def explain_stuck_weights(weights: list[Tensor]) -> str:
    """The reason why steps of these weights have no effect, with a remedy."""
    if any(w.dtype in HALF for w in weights):
        return (
            "they are held in half precision, which rounds it to nothing. Set `loading.master_weights: true`, for "
            "sharded weights `loading.dtype: float32` and `--trainer.precision=bf16-mixed`, or take an optimizer that "
            "rounds at random (torchao's, with `bf16_stochastic_round: true`)."
        )
    return "it is too small even for float32. Raise the learning rate, or `execution.max_grad_norm` for plain SGD."


class ConfiguredOptions:
    """The options of an optimiser and its schedule as configured; a checkpoint then restores those of its own run.

    It is made before the optimiser has a schedule or a restored state.
    """

    def __init__(self, optimizer: Optimizer, make_schedule: Callable[[Any], Any] | None) -> None:
        self.groups = options_of(optimizer)  # Copies, since schedules may fill a rate in place.
        self._make_schedule = make_schedule
        kinds = [kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer)]
        self._arguments = {name for kind in kinds for name in inspect.signature(kind).parameters}

    def apply(self, optimizer: Any, scheduler: Any, num_steps: int) -> None:
        """Put them into an optimiser and a scheduler with restored states, as after `num_steps` optimiser steps.

        So what the user has changed for a resume has its effect, and a schedule is where it would be if the run had
        begun with it; without a change it is where it was. What is no argument of the optimiser's constructor keeps the
        value from the checkpoint, since some optimisers count in their options.
        """
        rehearsal, restored = idle_optimizer(self.groups), getattr(optimizer, "optimizer", optimizer).state
        if self._make_schedule is not None:
            rehearsed = self._make_schedule(rehearsal)
            for _ in range(num_steps):
                rehearsal.step()
                rehearsed.step()
            scheduler.load_state_dict(rehearsed.state_dict())
        for group, begun, options in zip(optimizer.param_groups, self.groups, options_of(rehearsal), strict=True):
            group |= {k: value for k, value in options.items() if k in self._arguments or k not in begun}
            if group.get("fused"):  # A run on CPUs kept the numbers of steps there.
                for weight in group["params"]:
                    state = restored.get(weight, {})
                    state |= {k: v.to(weight.device) for k, v in state.items() if k == "step"}


class _Idle(Optimizer):
    """An optimiser that holds options for a schedule; its steps do nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing; schedules count the calls."""


def idle_optimizer(groups: Sequence[dict[str, Any]]) -> Optimizer:
    """An optimiser with copies of these groups of options, on which a schedule can be rehearsed."""
    return _Idle([copy.deepcopy(group) | {"params": [torch.zeros(0)]} for group in groups], copy.deepcopy(groups[0]))


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the options of each group of parameters."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

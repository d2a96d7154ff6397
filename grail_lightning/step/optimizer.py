"""The optimiser's step, its schedule, and its options after a resume."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from grail_lightning.distributed.gradients import Gradients
from grail_lightning.distributed.master_weights import HALF
from grail_lightning.runtime.seeds import seeded

_SCHEDULED = {"lr", "momentum", "betas"}  # The options that torch's schedules write into.


def check_optimizer(make: Callable[[Any], Optimizer], schedule: Callable[[Any], Any] | None = None) -> None:
    """Make the optimiser and its schedule for a matrix, so that torch checks their options before a model is loaded.

    Raises:
        ValueError: If one of them cannot be made with its options, or its step needs more than the gradients.
    """
    option = "optimizer"
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    try:
        try:
            optimizer = make(iter([matrix, vector]))
        except (TypeError, ValueError):  # Some accept no vectors.
            optimizer = make(iter([matrix]))
        inspect.signature(optimizer.step).bind()
        if schedule is not None:
            option = "scheduler"
            inspect.signature(schedule(optimizer).step).bind()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{option}` cannot be used: {str(error).rstrip('.')}. Correct its options.") from error


def take_step(
    gradients: Gradients, optimizer: Optimizer, max_norm: float | None, *, seed: int, warn_if_unmoved: bool = False
) -> dict[str, float]:
    """Clip the gradients to `max_norm` (None only measures), take a step, and return the norm and the learning rate.

    Without gradients (no live row) the step changes nothing, but counts, so that a run without a learning signal ends.

    Args:
        gradients: The gradients of the step.
        optimizer: The optimiser of the trainable weights.
        max_norm: See above.
        seed: The seed of what the optimiser draws, such as stochastic rounding. All ranks pass the same one, since
            they must round replicated weights alike.
        warn_if_unmoved: Whether to warn if a step that should change the parameters changes none. The caller sets it
            until the first such step.

    Raises:
        ValueError: If the norm is not finite, before any weight has changed. All ranks have the same norm and raise.
    """
    norm = gradients.clip(max_norm)
    figures = {"grad_norm": norm, "learning_rate": float(optimizer.param_groups[0]["lr"])}
    if not math.isfinite(norm):
        raise ValueError(
            f"`grad_norm` must be finite, but got {norm} at learning rate {figures['learning_rate']:g}. This step was "
            "not taken, and the last checkpoint is unchanged: resume from it with a lower learning rate or "
            "`execution.max_grad_norm`. If the error occurs again at once, look at rewards and token weights, try "
            "`loading.dtype: float32`, or find its origin with `--trainer.detect_anomaly=true`."
        )
    watch = _watching(gradients.weights, figures) if warn_if_unmoved else nullcontext()
    with watch, seeded(gradients.weights[0].device, seed):
        optimizer.step()
    return figures


@contextmanager
def _watching(watched: list[Tensor], metrics: dict[str, float]) -> Iterator[None]:
    """Warn if the optimiser step inside changes no parameter although it should: the logged figures can hide that."""
    before = [_first_entries(p) for p in watched]
    yield
    should_move = metrics["grad_norm"] > 0 and metrics["learning_rate"] > 0
    if should_move and all(torch.equal(old, _first_entries(p)) for old, p in zip(before, watched, strict=True)):
        rank_zero_warn(
            f"No parameter moved in a step with gradient norm {metrics['grad_norm']:.3g} and learning rate "
            f"{metrics['learning_rate']:.3g}: {explain_stuck_weights(watched)}"
        )


def explain_stuck_weights(weights: list[Tensor]) -> str:
    """The reason why steps of these weights have no effect, with a remedy."""
    if any(w.dtype in HALF for w in weights):
        return (
            "they are held in half precision, which rounds it to nothing. Set `loading.master_weights: true`, for "
            "sharded weights `loading.dtype: float32` and `--trainer.precision=bf16-mixed`, or take an optimizer that "
            "rounds at random (torchao's, with `bf16_stochastic_round: true`)."
        )
    return "it is too small even for float32. Raise the learning rate, or `execution.max_grad_norm` for plain SGD."


def _first_entries(parameter: Tensor) -> Tensor:
    """A copy of the first few entries; of this rank's shard if the parameter is sharded."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().flatten()[:4096].clone()


def steps_beyond(trainer: Trainer, planned: int) -> int:
    """The number of a batch's planned optimiser steps that exceed `max_steps`."""
    return max(0, trainer.global_step + planned - trainer.max_steps) if trainer.max_steps >= 0 else 0


def with_schedule(optimizer: Optimizer, make: Callable[[Any], Any] | None) -> OptimizerLRScheduler:
    """The optimiser in Lightning's form, with the schedule made by `make`, if any, which counts optimiser steps."""
    if make is None:
        return optimizer
    scheduler = make(optimizer)  # It adds `initial_lr` to the groups.
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def configured_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, for `keep_options`; copies, since schedules may fill a rate in place."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def option_record(options: list[dict[str, Any]], make: Callable[[Any], Any] | None) -> dict[str, Any]:
    """The configured options and schedule as plain values, so that a resumed run can detect changes by the user."""
    return {"options": _plain(options), "schedule": _plain(_rehearse(options, make, steps=0)[1])}


def keep_options(
    optimizer: Any,
    scheduler: Any,
    options: list[dict[str, Any]],
    make: Callable[[Any], Any] | None,
    before: Mapping[str, Any] | None,
    steps: int,
) -> None:
    """After a resume, apply options of the optimiser and of its schedule that the user has changed.

    Unchanged options keep their values from the checkpoint, since schedules and some optimisers write into them. A
    changed schedule, or one of a changed learning rate, continues as if the run had begun with it.

    Args:
        optimizer: The optimiser with its restored state.
        scheduler: The scheduler with its restored state; None without one.
        options: The options of each parameter group, from `configured_options`.
        make: The schedule that is configured now.
        before: The `option_record` of the run that saved the checkpoint; without it all options count as changed.
        steps: The number of optimiser steps that the run has taken.
    """
    record = option_record(options, make)
    if record == before:
        return
    rehearsed, state = _rehearse(options, make, steps)
    another = before is None or record["schedule"] != before["schedule"]
    for k, group in enumerate(optimizer.param_groups):
        now, then = record["options"][k], None if before is None else before["options"][k]
        changed = {name for name, value in now.items() if then is None or name not in then or then[name] != value}
        if another:
            changed |= _SCHEDULED & group.keys() | rehearsed[k].keys() - now.keys()
        group.update({name: rehearsed[k][name] for name in changed})
    if another and scheduler is not None:
        scheduler.load_state_dict(state)


class _Idle(Optimizer):
    """An optimiser that holds options for a schedule; its steps do nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing; schedules count the calls."""


def _rehearse(
    options: list[dict[str, Any]], make: Callable[[Any], Any] | None, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The options of each group and the state of the configured schedule after the given number of steps."""
    groups = [copy.deepcopy(group) | {"params": [torch.zeros(0)]} for group in options]
    optimizer = _Idle(groups, copy.deepcopy(options[0]))
    scheduler = None if make is None else make(optimizer)
    if scheduler is not None:
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    return configured_options(optimizer), None if scheduler is None else scheduler.state_dict()


def _plain(value: object) -> object:
    """Tensors as numbers, also inside dictionaries and lists, so that `==` compares them."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value

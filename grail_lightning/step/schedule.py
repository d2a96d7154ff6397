"""The optimiser's schedule, its options after a resume, and the number of steps that `max_steps` allows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

_SCHEDULED = {"lr", "momentum", "betas"}  # The options that torch's schedules write into.


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
    """The configured options as plain values for a checkpoint, so that a resumed run can detect changes by the user.

    Args:
        options: The options of each parameter group, from `configured_options`.
        make: The configured schedule; see `with_schedule`.
    """
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
        options: The options of each parameter group, as configured now.
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

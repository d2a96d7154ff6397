"""The optimiser's schedule, its options after a resume, and the steps that `max_steps` leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

SCHEDULED = {"lr", "momentum", "betas"}  # The options that torch's schedules write into.


def steps_beyond(trainer: Any, planned: int) -> int:
    """How many of a batch's planned optimiser steps lie beyond `max_steps`."""
    return max(0, trainer.global_step + planned - trainer.max_steps) if trainer.max_steps >= 0 else 0


def with_schedule(optimizer: Any, make: Callable[[Any], Any] | None) -> Any:
    """The optimiser as Lightning wants it, with the schedule that `make` gives it, which counts optimiser steps."""
    if make is None:
        return optimizer
    scheduler = make(optimizer)  # It adds `initial_lr` to the groups.
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def configured_options(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each parameter group, for `keep_options`; copies, since schedules may fill a rate in place."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def option_record(options: list[dict[str, Any]], make: Callable[[Any], Any] | None) -> dict[str, Any]:
    """What is configured, as plain values for a checkpoint: a resumed run finds by it what the user has changed.

    Args:
        options: Of each parameter group, from `configured_options`.
        make: The configured schedule, as for `with_schedule`.
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
    """After a resume let options of the optimiser and of its schedule win where they are configured anew.

    What was not changed stays as the checkpoint has it: schedules, and some optimisers, write into the options. A
    changed schedule, or one of a changed learning rate, is where it would be had the run begun with it.

    Args:
        optimizer: With its restored state.
        scheduler: Likewise; None without one.
        options: Of each parameter group, as configured now.
        make: The schedule that is configured now.
        before: The `option_record` of the run that saved the checkpoint; without it everything counts as changed.
        steps: How many optimiser steps the run has taken.
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
            changed |= SCHEDULED & group.keys() | rehearsed[k].keys() - now.keys()
        group.update({name: rehearsed[k][name] for name in changed})
    if another and scheduler is not None:
        scheduler.load_state_dict(state)


class _Idle(torch.optim.Optimizer):
    """Bears options for a schedule; its steps do nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Schedules count these."""


def _rehearse(
    options: list[dict[str, Any]], make: Callable[[Any], Any] | None, steps: int
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The options of each group, and the state of the schedule, after so many steps with what is configured."""
    groups = [copy.deepcopy(group) | {"params": [torch.zeros(0)]} for group in options]
    optimizer = _Idle(groups, copy.deepcopy(options[0]))
    scheduler = None if make is None else make(optimizer)
    if scheduler is not None:
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
    return configured_options(optimizer), None if scheduler is None else scheduler.state_dict()


def _plain(value: Any) -> Any:
    """Tensors as numbers, also inside dictionaries and lists, so that `==` compares them."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value

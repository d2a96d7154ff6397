"""What stands around an optimiser's step: the norm of its gradients, whether it moves, its options after a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.policy import Policy
from grail_lightning.policy.masters import HALF

SCHEDULED = {"lr", "momentum", "betas"}  # The options that torch's schedules write into.


def take_step(policy: Policy, optimizer: Any, max_norm: float | None, *, watched: bool = False) -> dict[str, float]:
    """Clip the gradients and let the optimiser step.

    Without gradients (no live row) that changes nothing, but counts: a dead run ends, too.

    Args:
        policy: Whose gradients.
        optimizer: Of its trainable weights.
        max_norm: As for `clip_gradients`.
        watched: Whether to warn if no parameter moves.

    Returns:
        Norm and learning rate.

    Raises:
        ValueError: If the norm is not finite, before anything has moved; on all ranks, which have the same norm.
    """
    norm = clip_gradients(policy, max_norm)
    figures = {"grad_norm": norm, "learning_rate": float(optimizer.param_groups[0]["lr"])}
    if not math.isfinite(norm):
        raise ValueError(
            f"`grad_norm` must be finite, but got {norm} at learning rate {figures['learning_rate']:g}. This step was "
            "not taken, and the last checkpoint is as it was: go on from there with a lower learning rate or "
            "`objective.max_grad_norm`. If it comes back at once, look at rewards and token weights, try "
            "`loading.dtype: float32`, or find its origin with `--trainer.detect_anomaly=true`."
        )
    with moving(policy, figures) if watched else nullcontext():
        optimizer.step()
    return figures


def clip_gradients(policy: Policy, max_norm: float | None) -> float:
    """Scale the gradients down to `max_norm`; their norm before. None only measures.

    Args:
        policy: Whose trainable parameters.
        max_norm: The limit.
    """
    limit = float("inf") if max_norm is None else max_norm
    norm: Any = torch.nn.utils.clip_grad_norm_(policy.trained_weights, limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def cut_off(trainer: Any, planned: int) -> int:
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


@contextmanager
def moving(policy: Policy, metrics: dict[str, float]) -> Iterator[None]:
    """Warn if the optimiser step inside moves no parameter although it should: healthy curves can hide that."""
    watched = policy.trained_weights
    before = [_first_entries(p) for p in watched]
    yield
    should_move = metrics["grad_norm"] > 0 and metrics["learning_rate"] > 0
    if should_move and all(torch.equal(old, _first_entries(p)) for old, p in zip(before, watched, strict=True)):
        rank_zero_warn(
            f"No parameter moved in a step with gradient norm {metrics['grad_norm']:.3g} and learning rate "
            f"{metrics['learning_rate']:.3g}: {finer(watched)}"
        )


def finer(weights: list[Tensor]) -> str:
    """Why steps of these weights come to nothing, and what to do about it."""
    if any(w.dtype in HALF for w in weights):
        return (
            "they are held in half precision, which rounds it to nothing. Set `loading.master_weights: true`, for "
            "sharded weights `loading.dtype: float32` and `--trainer.precision=bf16-mixed`, or take an optimizer that "
            "rounds at random (torchao's, with `bf16_stochastic_round: true`)."
        )
    return "it is too small even for float32. Raise the learning rate, or `objective.max_grad_norm` for plain SGD."


def _first_entries(parameter: Any) -> Tensor:
    """A copy of the first few entries; of this rank's shard if the parameter is sharded."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().flatten()[:4096].clone()

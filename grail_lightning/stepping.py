"""What stands around an optimiser's step: the norm of its gradients, whether it moves, its options after a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.policy import Policy
from grail_lightning.policy.masters import HALF


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


def with_schedule(optimizer: Any, make: Callable[[Any], Any] | None) -> Any:
    """The optimiser as Lightning wants it, with the schedule that `make` gives it, which counts optimiser steps."""
    if make is None:
        return optimizer
    scheduler = make(optimizer)  # It adds `initial_lr` to the groups.
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def configured_options(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each parameter group, for `keep_options`; copies, since schedules may fill a rate in place."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def keep_options(optimizer: Any, scheduler: Any, options: list[dict[str, Any]]) -> None:
    """After a resume let the optimiser's configured options win over those in the checkpoint.

    A schedule goes on where it was: a learning rate that was configured anew scales it.

    Args:
        optimizer: With its restored state.
        scheduler: Likewise; None without one.
        options: Of each parameter group, as configured.
    """
    for k, (group, configured) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        begun = group.get("initial_lr", group["lr"])
        group.update({name: value for name, value in configured.items() if name not in ("lr", "initial_lr")})
        if configured["lr"] == begun:
            continue
        group["lr"] = configured["lr"] if scheduler is None else group["lr"] * configured["lr"] / begun
        if scheduler is not None:
            group["initial_lr"] = scheduler.base_lrs[k] = configured["lr"]


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

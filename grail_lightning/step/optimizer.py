"""The optimiser's step, which clips the gradients and warns if no weight changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from grail_lightning.distributed.gradients import Gradients
from grail_lightning.distributed.master_weights import HALF
from grail_lightning.runtime.seeds import seeded


def take_step(
    gradients: Gradients, optimizer: Optimizer, max_norm: float | None, *, seed: int, watched: bool = False
) -> dict[str, float]:
    """Clip the gradients and take a step of the optimiser.

    Without gradients (no live row) the step changes nothing, but counts, so that a run without a learning signal ends.

    Args:
        gradients: The gradients of the step.
        optimizer: The optimiser of the trainable weights.
        max_norm: The norm to which gradients are scaled down; None only measures.
        seed: The seed of what the optimiser draws, such as stochastic rounding. All ranks pass the same one, since
            they must round replicated weights alike.
        watched: Whether to warn if no parameter changes. The caller sets it until one has changed.

    Returns:
        The norm and the learning rate.

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
    watch = _warn_if_unmoved(gradients.weights, figures) if watched else nullcontext()
    with watch, seeded(gradients.weights[0].device, seed):
        optimizer.step()
    return figures


@contextmanager
def _warn_if_unmoved(watched: list[Tensor], metrics: dict[str, float]) -> Iterator[None]:
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

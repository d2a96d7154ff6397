"""What Lightning passes to a hook, by its own type: Lightning declares base classes, and outputs of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.core.step.figures import StepOutput

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule


def module_of(pl_module: LightningModule) -> GrailModule:
    """The module of a run. An import of its class would go up from this package."""
    module: Any = pl_module
    return cast("GrailModule", module)


def output_of(outputs: object) -> StepOutput:
    """The output of a step. A training step returns it inside a mapping, as Lightning requires."""
    output = outputs["output"] if isinstance(outputs, Mapping) else outputs
    assert isinstance(output, StepOutput)
    return output


def rollouts_of(output: StepOutput) -> RolloutBatch:
    """The rollouts of a training step or of `predict`, which have advantages."""
    assert isinstance(output.batch, RolloutBatch)
    return output.batch


def policy_of(module: GrailModule) -> Policy:
    """The policy of a run that has begun."""
    assert module.policy is not None, "`configure_model` loads the policy"
    return module.policy


# Lightning does not declare the next three attributes.


def fast_dev_run(trainer: Trainer) -> bool:
    """Whether the trainer only tries a few batches, and writes nothing."""
    return bool(getattr(trainer, "fast_dev_run", False))


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The callbacks of a run."""
    callbacks: list[Callback] = getattr(trainer, "callbacks", [])
    return callbacks


def data_of(trainer: Trainer) -> LightningDataModule | None:
    """The data module of a run; None if it has loaders alone."""
    data: LightningDataModule | None = getattr(trainer, "datamodule", None)
    return data


def tell_policy(trainer: Trainer, pl_module: LightningModule) -> int:
    """Log which policy validation, test or prediction uses, and return its number of optimiser steps. A collective."""
    step = module_of(pl_module).weights_step
    last = RunFolder(trainer).path / "checkpoints" / "last.ckpt"
    if trainer.ckpt_path:
        policy = f"of {trainer.ckpt_path}, saved at step {step}."
    elif step:
        policy = f"in memory, at step {step}."
    else:
        policy = f"as it was loaded from {module_of(pl_module).policy_name}, without a checkpoint."
        policy += f" Give `--ckpt_path last` for that of {last}." if last.exists() else ""
    rank_zero_info(f"`{trainer.state.fn and trainer.state.fn.value}` uses the policy {policy}")
    return step

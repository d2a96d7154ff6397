"""The message that names the policy which validation, test or prediction uses."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.callbacks.hooks import module_of, subcommand_of
from grail_lightning.runtime.run_folder import RunFolder


def tell_policy(trainer: Trainer, pl_module: LightningModule, loaded: int | None) -> int:
    """Log which policy is used, and return its number of optimiser steps. Every rank must call this function.

    Args:
        trainer: The trainer, outside of a fit.
        pl_module: The module whose policy is used.
        loaded: The number of optimiser steps of the loaded checkpoint, if there is one.
    """
    step = trainer.global_step if loaded is None else loaded
    last = RunFolder(trainer).path / "checkpoints" / "last.ckpt"
    if trainer.ckpt_path:
        policy = f"of {trainer.ckpt_path}, saved at step {step}."
    elif step:
        policy = f"in memory, at step {step}."
    else:
        policy = f"as it was loaded from {module_of(pl_module).policy_name}, without a checkpoint."
        policy += f" Give `--ckpt_path last` for that of {last}." if last.exists() else ""
    rank_zero_info(f"`{subcommand_of(trainer)}` uses the policy {policy}")
    return step

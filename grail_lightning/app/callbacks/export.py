"""The callback that exports the trained policy in Hugging Face format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from grail_lightning.app.callbacks.hooks import callbacks_of, fast_dev_run, module_of
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.run_folder import RunFolder, unused

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule

_LAST_FILE = "tokenizer_config.json"  # The tokenizer is written after the weights.


class ExportPolicy(Callback):
    """Writes the policy in Hugging Face format when training ends.

    ``AutoModelForCausalLM.from_pretrained`` loads the folder, and so does ``--model.policy=FOLDER``. Adapters are
    merged into the weights. An earlier policy in the folder is moved aside, unless a resumed run writes the export in
    its own folder again.

    Args:
        which: The exported weights: the last ones, or those of the checkpoint with the best monitored metric.
        folder: The folder to write to; default ``export`` in the folder of the run.

    Raises:
        ValueError: If `folder` is that of the policy which is trained.
    """

    def __init__(self, which: Literal["last", "best"] = "last", folder: str | None = None) -> None:
        check_option("which", which, Literal["last", "best"])
        self.which, self.folder = which, folder
        self._path, self._trained = Path(), False
        self._gathered: dict[str, Tensor] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to write over the policy that is trained, which a resumed run and its reference load again."""
        name = module_of(pl_module).policy_name
        is_source = isinstance(name, str) and self.folder and Path(self.folder).resolve() == Path(name).resolve()
        if is_source and stage == "fit":
            raise ValueError(f"`folder` of ExportPolicy must not be `policy`'s own, but got {self.folder!r}.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determine where to write. This is a broadcast over all ranks."""
        self._path, self._trained = self.folder_of(trainer), False

    def folder_of(self, trainer: Trainer) -> Path:
        """The folder to write to. A broadcast: every rank must call it."""
        return Path(self.folder) if self.folder else RunFolder(trainer).path / "export"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather sharded weights. This needs all ranks, and the strategy before its teardown."""
        self._trained = True
        if not fast_dev_run(trainer):
            self._gathered = _gathered(pl_module) if _is_sharded(pl_module) else None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the folder after the last checkpoint is saved. A resumed run with no step left writes it, too."""
        module = module_of(pl_module)
        weights, self._gathered = self._gathered, None
        ended = self._trained or (trainer.ckpt_path is not None and not _is_sharded(module))
        if module.policy is None or not ended or fast_dev_run(trainer) or not trainer.is_global_zero:
            return
        # A `ModelCheckpoint` of the user's without `monitor` calls its newest file the best. The run's own is the last.
        monitors = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor]
        source, best = f"step {trainer.global_step}", Path(monitors[-1].best_model_path if monitors else "")
        if self.which == "best" and best.is_file():
            # The file is this run's own, and the states of callbacks in it may be of any type.
            weights = torch.load(best, map_location="cpu", weights_only=False)["state_dict"]
            source = f"checkpoint {best}"
        elif self.which == "best":
            rank_zero_warn(
                "`which: best` found no checkpoint file of a `ModelCheckpoint` with `monitor`; the last weights are "
                "exported instead. Sharded checkpoints must be consolidated first: "
                "`python -m lightning.pytorch.utilities.consolidate_checkpoint`."
            )
        policy = module.policy if weights is None else _unsharded(module, weights)
        if (self._path / "config.json").exists() and (self.folder or trainer.ckpt_path is None):
            aside = self._path.rename(unused(self._path))
            rank_zero_info(f"{self._path} held an earlier policy, which is now in {aside}.")
        policy.save(self._path)
        rank_zero_info(f"Wrote the policy ({source}) to {self._path}. Use it as `--model.policy={self._path}`.")


def check_steps_left(trainer: Trainer, checkpoint: str | Path, state: Mapping[str, Any]) -> None:
    """Check that a run has something to do after a checkpoint: a step, or the export of one that was interrupted."""
    step, epochs = state["global_step"], 0
    if loop := state.get("loops", {}).get("fit_loop"):
        current, over = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["is_last_batch"]
        epochs = current["started"] if over else current["processed"]  # A save in the last batch is before its end.
    limits = {"max_steps": (trainer.max_steps, step), "max_epochs": (trainer.max_epochs or -1, epochs)}
    option = next((name for name, (most, reached) in limits.items() if 0 <= most <= reached), None)
    if option is None or fast_dev_run(trainer):
        return
    most, reached = limits[option]
    export = next((c for c in callbacks_of(trainer) if isinstance(c, ExportPolicy)), None)
    if export is not None and most == reached:
        written = export.folder_of(trainer) / _LAST_FILE
        if not written.exists() or written.stat().st_mtime < Path(checkpoint).stat().st_mtime:
            return
    unit = option.removeprefix("max_").removesuffix("s")
    raise ValueError(
        f"`trainer.{option}` must be above the {unit} of the checkpoint to train on, but got {most}, and {checkpoint} "
        f"is of {unit} {reached}: no step is left. Raise `trainer.{option}` above {reached}, or leave `ckpt_path` out "
        "for a new run."
    )


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _gathered(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded weights, on the CPU of the first rank. A collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _unsharded(module: GrailModule, weights: dict[str, Tensor]) -> Policy:
    """A second policy on the CPU with the given weights. It is only saved; every model supports eager attention."""
    plain: dict[str, Any] = {"attention": "eager", "gradient_checkpointing": False, "packing": False}
    policy = load_policy(module.policy_name, dataclasses.replace(module.loading, **plain))
    policy.load_state_dict({k.removeprefix("policy."): v for k, v in weights.items() if k.startswith("policy.")})
    return policy

"""The trained policy in Hugging Face format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from grail_lightning.policy import Policy, load_policy
from grail_lightning.run_folder import RunFolder

PREFIX = "policy."


class ExportPolicy(Callback):
    """Writes the policy in Hugging Face format when training ends.

    ``AutoModelForCausalLM.from_pretrained`` loads the folder, and so does ``--model.policy=FOLDER``. Adapters are
    merged into the weights.

    Args:
        which: The last weights, or those of the checkpoint with the best monitored figure.
        folder: Where; default ``export`` in the folder of the run.

    Raises:
        ValueError: If `which` is something else, or `folder` a file.
    """

    def __init__(self, which: Literal["last", "best"] = "last", folder: str | None = None) -> None:
        if which not in ("last", "best"):
            raise ValueError(f"`which` must be last or best, but got {which!r}.")
        self.which, self.folder = which, folder
        self._path: Path | None = None
        self._gathered: dict[str, Tensor] | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Transformers would only log it when it finds a file in the folder's place.

        Raises:
            ValueError: If there is one.
        """
        if self.folder and Path(self.folder).is_file():
            raise ValueError(f"`folder` must be a folder, but {self.folder} is a file. Name another one.")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Gather sharded weights; that takes every rank, and the strategy as it still is."""
        if not trainer.fast_dev_run:
            self._path = Path(self.folder) if self.folder else RunFolder(trainer).path / "export"
            self._gathered = _gathered(trainer.model) if _is_sharded(trainer.model) else None

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the folder, when the last checkpoint is safe already."""
        path, self._path = self._path, None
        if path is None or not trainer.is_global_zero:
            return
        weights, source = self._weights(trainer)
        policy = pl_module.policy if weights is None else _unsharded(pl_module, weights)
        policy.save(path)
        rank_zero_info(f"Wrote the policy ({source}) to {path}. Use it as `--model.policy={path}`.")

    def _weights(self, trainer: Trainer) -> tuple[dict[str, Tensor] | None, str]:
        """Weights to export, and what they are; None means those that the policy has now."""
        gathered, self._gathered = self._gathered, None
        if self.which == "best":
            best = Path(getattr(trainer.checkpoint_callback, "best_model_path", ""))
            if best.is_file():
                # This run's own file, which may hold whatever its callbacks keep.
                state = torch.load(best, map_location="cpu", weights_only=False)["state_dict"]
                return state, f"checkpoint {best}"
            rank_zero_warn(
                "`which: best` found no checkpoint file of a `ModelCheckpoint` with `monitor`; the last weights are "
                "exported instead. Sharded checkpoints must be consolidated first: "
                "`python -m lightning.pytorch.utilities.consolidate_checkpoint`."
            )
        return gathered, f"step {trainer.global_step}"


def _is_sharded(model: nn.Module | None) -> bool:
    from torch.distributed.tensor import DTensor

    assert model is not None
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _gathered(model: nn.Module | None) -> dict[str, Tensor]:
    """The whole weights, on the CPU of the first rank. A collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    assert model is not None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(model, options=options)
    return dict(state)


def _unsharded(pl_module: Any, weights: dict[str, Tensor]) -> Policy:
    """A second policy, on the CPU, with other weights. It is only written: eager attention is what all models have."""
    plain: dict[str, Any] = {"attention": "eager", "gradient_checkpointing": False, "packing": False, "compile": False}
    loading = dataclasses.replace(pl_module.loading, **plain)
    policy = load_policy(pl_module.policy_name, loading)
    policy.load_state_dict({k.removeprefix(PREFIX): v for k, v in weights.items() if k.startswith(PREFIX)})
    return policy

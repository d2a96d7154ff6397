"""The callback that arranges TensorBoard: the most important curves, and hyper-parameters beside final figures."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.hooks import callbacks_of, data_of, fast_dev_run, module_of
from grail_lightning.credit.base import CreditControl, TokenCredit
from grail_lightning.runtime.seeds import run_seed
from grail_lightning.step.outputs import tag
from grail_lightning.tasks.import_path import GIVEN

# The charts of the page "Custom Scalars": category -> chart -> tags. The most important ones come first.
LAYOUT = {
    "outcome": {
        "accuracy": ("val/accuracy", "train/accuracy"),
        "reward": ("train/reward",),
        "groups without a difference": ("train/frac_reward_zero_std", "train/frac_correct_zero_std"),
        "length of responses": ("train/completions/mean_length", "val/completions/mean_length"),
        "share of responses that were cut": ("train/completions/clipped_ratio", "val/completions/clipped_ratio"),
    },
    "policy": {
        "entropy": ("policy/entropy", "policy/entropy_sampled"),
        "KL to the reference": ("policy/kl",),
        "gradient norm": ("policy/grad_norm",),
        "clipped tokens": tuple(f"policy/clip_ratio/{name}" for name in ("region_mean", "low_mean", "high_mean")),
        "sampler and trainer apart": ("policy/sampling/sampling_logp_difference/mean",),
    },
    "credit": {
        "concentration": ("credit/top10_mass", "credit/ess_ratio"),
        "flawed tokens found at forks": tuple(
            f"credit/fork_auroc{by}_{kind}" for kind in ("slip", "misconception") for by in ("", "_surprisal")
        ),
        "weight of flawed to sound tokens": ("credit/flawed_to_sound_weight",),
        "weights": ("credit/weight_mean", "credit/weight_std"),
    },
    "speed": {
        "tokens per second": ("speed/tokens_per_second",),
        "seconds of each phase": tuple(f"speed/time/{phase}" for phase in ("sample", "grade", "credit", "update")),
        "memory": ("speed/peak_memory_gb",),
    },
}
_DEPTH = 3
_PLAIN = (type(None), bool, int, float, str)


class Dashboard(Callback):
    """Arranges the most important curves in TensorBoard, and logs the hyper-parameters with the final figures.

    TensorBoard's page "Custom Scalars" shows the curves that matter first (`LAYOUT`), its page "HParams" one line a run
    that has finished: the learning rate and the options of the module, and ``val/first_accuracy``,
    ``val/final_accuracy`` and ``train/final_reward``. `hparams.yaml` in the folder of a run and other loggers have the
    hyper-parameters when training begins; `config.yaml` has all options.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the layout and `hparams.yaml`, and give other loggers the hyper-parameters."""
        if not trainer.is_global_zero or fast_dev_run(trainer):
            return
        self._parameters = _hyper_parameters(trainer, pl_module)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(self._parameters)
                continue
            # torch's `SummaryWriter` takes regular expressions for tags.
            charts = {
                category: {name: ["Multiline", [f"^{re.escape(t)}$" for t in tags]] for name, tags in charts.items()}
                for category, charts in LAYOUT.items()
            }
            logger.experiment.add_custom_scalars(charts)
            logger.log_hyperparams(self._parameters, {})  # Without figures yet, hence for the file alone.
            # Lightning has written the file before there was an optimizer, and would not replace it.
            Path(logger.log_dir, logger.NAME_HPARAMS_FILE).unlink(missing_ok=True)
            logger.save()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the line of the run for TensorBoard's page "HParams"."""
        figures = {}
        for evaluation in (c for c in callbacks_of(trainer) if isinstance(c, Evaluation)):
            for name, measured in (("first", evaluation.first), ("final", evaluation.last)):
                if measured:
                    figures[f"val/{name}_accuracy"] = float(measured["accuracy"])
        if (reward := trainer.callback_metrics.get(tag("reward"))) is not None:
            figures["train/final_reward"] = float(reward)
        for logger in trainer.loggers if self._parameters else []:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(self._parameters, figures, step=trainer.global_step)


def _hyper_parameters(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The options of a fit that matter for its outcome, as nested plain values. Call it when training begins."""
    module, data = module_of(pl_module), data_of(trainer)
    # As configured: in a resumed run the groups hold those of the checkpoint until the module's own `on_train_start`.
    group = module.optimizer_options[0]
    options = {name: value for name, value in group.items() if isinstance(value, _PLAIN) and name != "lr"}
    names = ("sampling", "loading", "objective", "execution", "credit", "control")
    parts = {name: plain(part) for name in names if (part := getattr(module, name, None)) is not None}
    # What the options of a data module cannot say: the datasets and the rewards that a Python program gave it.
    specs = {f"data.{split}_{s.label}": s.path for split, of in getattr(data, "specs", {}).items() for s in of}
    rewards = getattr(getattr(data, "task", None), "rewards", [])
    sources = specs | {f"rewards.{reward.name}": reward.path for reward in rewards}
    return {
        "learning_rate": float(group["lr"]),  # It may be a tensor.
        "policy": str(module.policy_name),
        "seed": run_seed(),
        "max_steps": trainer.max_steps,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
        "data": plain(data),
        **{name: source for name, source in sources.items() if source.endswith(GIVEN)},
        **parts,
        "optimizer": {"class": type(trainer.optimizers[0]).__name__, **options},
    }


def plain(value: object, depth: int = 0) -> Any:
    """Options as plain values by name; those of a credit method, or of an object that is no record, with its class."""
    if isinstance(value, _PLAIN):
        return value
    if depth == _DEPTH:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return str([plain(item, depth + 1) for item in value])
    if dataclasses.is_dataclass(value):
        options = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    else:
        options = {
            name: item for name, item in getattr(value, "__dict__", {}).items() if name[0] != "_" and _is_option(item)
        }
    named = isinstance(value, TokenCredit | CreditControl) or not dataclasses.is_dataclass(value)
    kind = {"class": type(value).__name__} if named else {}
    return kind | {name: plain(item, depth + 1) for name, item in options.items()}


def _is_option(value: object) -> bool:
    return isinstance(value, (*_PLAIN, TokenCredit)) or dataclasses.is_dataclass(value)

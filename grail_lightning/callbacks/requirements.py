"""Checks of a run's settings, data and folders before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from grail_lightning.callbacks.choices import UNUSABLE_CALLBACKS
from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.export import ExportPolicy
from grail_lightning.callbacks.hooks import callbacks_of, data_of, fast_dev_run, module_of
from grail_lightning.callbacks.kept_samples import short_columns
from grail_lightning.callbacks.monitors import check_monitors
from grail_lightning.callbacks.predictions import PredictionWriter
from grail_lightning.data.lengths import PromptLimit, check_evaluated
from grail_lightning.data.loaders import EvaluationLoader, TrainingLoader
from grail_lightning.data.modules import PromptData
from grail_lightning.engines import RolloutEngine
from grail_lightning.policy.options import check_length
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.runtime.files import check_writable
from grail_lightning.tasks.base import Prompt

# Callbacks of Lightning that do nothing but write to loggers.
_FOR_LOGGERS = ("LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor")
_FOLDERS = {
    ("ModelCheckpoint", "dirpath"): "`checkpoint.dirpath`",
    ("LastCheckpoint", "folder"): "`last_checkpoint.folder`",
    ("ExportPolicy", "folder"): "`export.folder`",
}


def check_run(trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    """Raise now for settings and data with which a run would fail later.

    Raises:
        ValueError: If a callback does not work with this module or without a logger, the folder of the run cannot be
            written, a metric that is monitored cannot be there, validation would never be due, or the first prompt of
            a dataset cannot be encoded, or the engine cannot sample here.
    """
    check_callbacks(trainer)
    check_folders(trainer)
    if stage == "fit":
        _check_training(trainer)
        _check_validation(trainer)
        check_monitors(trainer, pl_module)
        _check_export(trainer)
    if stage == "predict":
        _check_predictions(trainer)
    _check_prompts(trainer, pl_module, stage)
    _check_engine(pl_module)
    if stage == "fit" and not trainer.enable_validation and trainer.limit_val_batches:
        rank_zero_info("No dataset for validation: no accuracy is measured, and no best checkpoint is kept.")


def check_callbacks(trainer: Trainer) -> None:
    """Check that every callback works with this module and, if it writes to loggers, that there is one.

    Raises:
        ValueError: If one does not.
    """
    for callback in callbacks_of(trainer):
        for name in (cls.__name__ for cls in type(callback).__mro__):
            if name in UNUSABLE_CALLBACKS:
                raise ValueError(f"`trainer.callbacks` must leave out {name}: {UNUSABLE_CALLBACKS[name]}")
            if name in _FOR_LOGGERS and not trainer.loggers:
                raise ValueError(
                    f"`trainer.logger` must not be false with {name}, which writes to loggers alone. Set "
                    "`--trainer.logger=CSVLogger`, say, or leave the callback out."
                )


def check_folders(trainer: Trainer) -> None:
    """Check that the run can write to its folder, to those of its loggers, and to those that callbacks name.

    Raises:
        ValueError: If it cannot.
    """
    folder = RunFolder(trainer).path  # A broadcast: every rank must take part.
    if not trainer.is_global_zero or fast_dev_run(trainer):
        return
    check_writable(folder, "`trainer.logger.save_dir`" if trainer.loggers else "`trainer.default_root_dir`")
    for logger in trainer.loggers[1:]:
        own = logger.log_dir if isinstance(logger, TensorBoardLogger | CSVLogger) else logger.save_dir
        if own and "://" not in str(own):
            check_writable(Path(own), f"`save_dir` of {type(logger).__name__}")
    for owner in (*callbacks_of(trainer), getattr(trainer, "profiler", None)):
        for name in ("dirpath", "folder"):
            own, kind = getattr(owner, name, None), type(owner).__name__
            if own and not Path(own).is_relative_to(folder):
                check_writable(Path(own), _FOLDERS.get((kind, name), f"`{name}` of {kind}"))


def _check_predictions(trainer: Trainer) -> None:
    """Check that the file of predictions can be written.

    Raises:
        ValueError: If it cannot.
    """
    files = [Path(c.file) for c in callbacks_of(trainer) if isinstance(c, PredictionWriter) and c.file]
    for file in files if trainer.is_global_zero else []:
        if file.is_dir():
            raise ValueError(f"`predictions.file` must be a file, but {file} is a folder. Name a file in it.")
        check_writable(file.parent, "The folder of `predictions.file`")


def _check_training(trainer: Trainer) -> None:
    """Check that there are batches to train on.

    Raises:
        ValueError: If the data module has no training data, or the Trainer is to take none.
    """
    if trainer.limit_train_batches == 0:
        raise ValueError(
            "`trainer.limit_train_batches` must not be 0, since nothing would be trained. Leave it out, or run "
            "`grail-lightning validate`."
        )
    data = data_of(trainer)
    if data is not None and not is_overridden("train_dataloader", data):
        raise ValueError(f"`data` must have a `train_dataloader`, but {type(data).__name__} has none. Write it.")


def _check_validation(trainer: Trainer) -> None:
    """Check that validation will be due.

    Raises:
        ValueError: If its interval is not positive, or is counted within an epoch and longer than it.
    """
    interval, epochs, data = trainer.val_check_interval, trainer.check_val_every_n_epoch, data_of(trainer)
    never = "For no validation set `trainer.limit_val_batches: 0`."
    if interval <= 0:
        raise ValueError(f"`trainer.val_check_interval` must be positive, but got {interval}. {never}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"`trainer.check_val_every_n_epoch` must be at least 1 or null, but got {epochs}. {never}")
    if epochs is None or not isinstance(interval, int) or not isinstance(data, PromptData):
        return
    batches, limit = len(data.train_dataloader()), trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if interval > batches:
        raise ValueError(
            f"`trainer.val_check_interval` must be at most the {batches} batches of an epoch, but got {interval}. "
            "Lower it, or count over epochs with `trainer.check_val_every_n_epoch: null`."
        )


def _check_export(trainer: Trainer) -> None:
    """Check that there will be a best checkpoint if it is to be exported.

    Raises:
        ValueError: If there will be none.
    """
    if not any(isinstance(c, ExportPolicy) and c.which == "best" for c in callbacks_of(trainer)):
        return
    saver = trainer.checkpoint_callback
    if not isinstance(saver, ModelCheckpoint) or saver.monitor is None or saver.save_top_k == 0:
        missing = "no best checkpoint is kept. Set `checkpoint.monitor`, and `checkpoint.save_top_k` to 1"
    elif saver.monitor.startswith("val/") and not trainer.enable_validation:
        missing = f"there is no validation, which {saver.monitor} needs. Give `data.val`"
    else:
        return
    raise ValueError(f"`export.which` must be last here, but got best, and {missing}; or leave `export.which` out.")


def _check_prompts(trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    """Make and encode prompts: the task must fit the rows, and all prompts of an evaluation the model.

    Raises:
        ValueError: If it does not.
    """
    data = data_of(trainer)
    if not isinstance(data, PromptData) or not hasattr(pl_module, "encode"):
        return
    module = module_of(pl_module)
    evaluation = next((c for c in callbacks_of(trainer) if isinstance(c, Evaluation)), None)
    drawn = (evaluation and evaluation.sampling) or module.sampling
    for prompts, training in _datasets(data, stage, validated=trainer.enable_validation):
        if len(prompts):
            module.encode(prompts[0].messages)
        if len(prompts) and not training:
            # Responses that `predict` is given are not sampled.
            given = stage == "predict" and "response" in prompts[0].columns
            response = 0 if given else drawn.max_response_length
            check_length(module.policy_name, module.loading, response)
            option = "evaluation.sampling.max_response_length"
            check_evaluated(prompts, module.encode, PromptLimit(None, module.context_length, response, option))
    if evaluation is not None and stage in ("test", "validate"):
        _tell_missing_columns(data, stage, evaluation.by)


def _tell_missing_columns(data: PromptData, stage: str, columns: Sequence[str]) -> None:
    """Say before sampling by which columns no problem can be told apart."""
    for column in columns:
        if not any(
            short_columns(prompt).get(column) is not None
            for prompts, _ in _datasets(data, stage, validated=True)
            for prompt in prompts
        ):
            rank_zero_info(
                f"`evaluation.by` names {column!r}, but no problem has a column of that name with a number or a short "
                "text: there will be no lines for it."
            )


def _check_engine(pl_module: LightningModule) -> None:
    """Check that the engine can sample from the policy: that its servers are there, say.

    Raises:
        ValueError: If it cannot.
    """
    engine = getattr(pl_module, "engine", None)
    if isinstance(engine, RolloutEngine):
        module = module_of(pl_module)
        engine.check(module.policy_name, module.loading)


def _datasets(data: PromptData, stage: str, *, validated: bool) -> Iterator[tuple[Sequence[Prompt], bool]]:
    """The prompts of each dataset of a stage, and whether they are for training."""
    loader: object = data.train_dataloader() if stage == "fit" else None
    if isinstance(loader, TrainingLoader):
        yield from ((part.prompts, True) for part in loader.sets)
    if stage != "fit" or validated:
        loaders = {"predict": data.predict_dataloader, "test": data.test_dataloader}.get(stage, data.val_dataloader)()
        yield from ((loader.prompts, False) for loader in loaders if isinstance(loader, EvaluationLoader))

"""Checks of a run's callbacks, folders and data before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.hooks import callbacks_of, data_of, fast_dev_run, module_of
from grail_lightning.data.lengths import PromptLimit, check_evaluated
from grail_lightning.data.loaders import EvaluationLoader, TrainingLoader
from grail_lightning.data.modules import PromptData
from grail_lightning.engines import RolloutEngine
from grail_lightning.policy import check_policy
from grail_lightning.runtime.files import check_writable
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.tasks.problem import Prompt


def check_run(trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    """Raise a `ValueError` now for settings and data with which a run would fail later."""
    check_callbacks(trainer)
    check_folders(trainer)
    data = data_of(trainer)
    if isinstance(data, PromptData) and hasattr(pl_module, "encode"):
        _check_prompts(trainer, pl_module, data, stage)
    engine = getattr(pl_module, "engine", None)
    if isinstance(engine, RolloutEngine):  # Are its servers there, say.
        module = module_of(pl_module)
        engine.check(module.policy_name, module.loading)
    if stage == "fit" and not trainer.enable_validation and trainer.limit_val_batches:
        rank_zero_info("No dataset for validation: no accuracy is measured, and no best checkpoint is kept.")


def check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that would silently do nothing, or end the run at once, beside manual optimisation."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            raise ValueError(
                f"`trainer.callbacks` must leave out {type(callback).__name__}: it needs automatic optimisation, and "
                "the module's is manual. Gradients accumulate by `model.execution.token_budget`."
            )


def check_folders(trainer: Trainer) -> None:
    """Check that the run can write to its folder and to those that callbacks name: hours later is too late."""
    folder = RunFolder(trainer).path  # A broadcast: every rank must take part.
    if not trainer.is_global_zero or fast_dev_run(trainer):
        return
    check_writable(folder, "`trainer.logger.save_dir`" if trainer.loggers else "`trainer.default_root_dir`")
    for callback in callbacks_of(trainer):
        for name in ("dirpath", "folder"):
            own = getattr(callback, name, None)
            if own and not Path(own).is_relative_to(folder):
                check_writable(Path(own), f"`{name}` of {type(callback).__name__}")


def _check_prompts(trainer: Trainer, pl_module: LightningModule, data: PromptData, stage: str) -> None:
    """Make and encode prompts: the task must fit the rows, and all prompts of an evaluation the model."""
    module = module_of(pl_module)
    evaluation = next((c for c in callbacks_of(trainer) if isinstance(c, Evaluation)), None)
    sampling = (evaluation and evaluation.sampling) or module.sampling
    for prompts, training in _datasets(data, stage, validated=trainer.enable_validation):
        if len(prompts):
            module.encode(prompts[0].messages)
        if len(prompts) and not training:
            # Responses that `predict` is given are not sampled.
            given = stage == "predict" and "response" in prompts[0].columns
            response = 0 if given else sampling.max_response_length
            check_policy(module.policy_name, module.loading, response)
            option = "evaluation.sampling.max_response_length"
            check_evaluated(prompts, module.encode, PromptLimit(None, module.context_length, response, option))


def _datasets(data: PromptData, stage: str, *, validated: bool) -> Iterator[tuple[Sequence[Prompt], bool]]:
    """The prompts of each dataset of a stage, and whether they are for training."""
    loader: object = data.train_dataloader() if stage == "fit" else None
    if isinstance(loader, TrainingLoader):
        yield from ((part.prompts, True) for part in loader.sets)
    if stage != "fit" or validated:
        loaders = {"predict": data.predict_dataloader, "test": data.test_dataloader}.get(stage, data.val_dataloader)()
        yield from ((loader.prompts, False) for loader in loaders if isinstance(loader, EvaluationLoader))

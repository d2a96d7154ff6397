"""The check of the names of metrics that callbacks monitor, before the model is loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint

from grail_lightning.callbacks.evaluation import Evaluation
from grail_lightning.callbacks.hooks import callbacks_of, data_of
from grail_lightning.callbacks.throughput import Throughput
from grail_lightning.data.loaders import EvaluationLoader
from grail_lightning.data.modules import PromptData
from grail_lightning.data.rows import RowPrompts
from grail_lightning.step.report import SHOWN
from grail_lightning.step.tags import GROUP_OF, tag

_OURS = ("grail_lightning.", "lightning.")
_STEP, _SPEED = tuple(tag(name) for name in SHOWN), tag("tokens_per_second")
_TRAINING = (*_STEP, _SPEED)
# These were tags before there were groups.
_MOVED = {name: tag(name) for name in (*SHOWN, "tokens_per_second")}
_NEARLY_THE_SAME = 0.9  # Of difflib's ratio: one or two letters of a name.


class Logged(NamedTuple):
    """The metrics that callbacks can monitor.

    Attributes:
        names: Their names, as far as they are known before the run.
        complete: Whether there can be no others: module and callbacks are those of this package and of Lightning.
    """

    names: tuple[str, ...]
    complete: bool


def check_monitors(trainer: Trainer, pl_module: LightningModule) -> None:
    """Check that the metrics that callbacks monitor, or write into the names of checkpoints, will be logged.

    A class of the user's own may log any metric. Beside one, only a name that is nearly that of a known metric is
    refused, or one by which an earlier version logged a metric.

    Raises:
        ValueError: If a metric cannot be there, is misspelt, or needs a validation that does not take place.
    """
    logged = logged_metrics(trainer, pl_module)
    savers = [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelCheckpoint)]
    for saver in savers:
        alone, kind = len(savers) == 1, type(saver).__name__
        # It counts epochs and steps by itself.
        known = Logged(tuple(dict.fromkeys((*logged.names, "epoch", "step"))), logged.complete)
        if saver.monitor is not None:
            _check_name("`checkpoint.monitor`" if alone else f"`monitor` of {kind}", saver.monitor, known)
        _check_filename("`checkpoint.filename`" if alone else f"`filename` of {kind}", saver, known)
    for stopper in callbacks_of(trainer):
        if isinstance(stopper, EarlyStopping):
            _check_name(f"`monitor` of {type(stopper).__name__}", stopper.monitor, logged)
            _check_due(stopper, trainer)


def logged_metrics(trainer: Trainer, pl_module: LightningModule) -> Logged:
    """The metrics of a fit, validation included whether it takes place or not."""
    names = list(_TRAINING if any(isinstance(c, Throughput) for c in callbacks_of(trainer)) else _STEP)
    evaluation = next((c for c in callbacks_of(trainer) if isinstance(c, Evaluation)), None)
    datasets = _evaluated(trainer) if evaluation is not None else []
    if evaluation is not None:
        names = evaluation.logged(datasets or ()) + names
    own = [c for c in (pl_module, *callbacks_of(trainer)) if not type(c).__module__.startswith(_OURS)]
    # These pass on what functions of the user's log, or log under the names of optimisers.
    own += [c for c in callbacks_of(trainer) if isinstance(c, LambdaCallback | LearningRateMonitor)]
    return Logged(tuple(dict.fromkeys(names)), complete=not own and datasets is not None)


def _evaluated(trainer: Trainer) -> list[str] | None:
    """The names of the validation datasets; None if only the validation itself will show them."""
    data = data_of(trainer)
    if not trainer.enable_validation or not isinstance(data, PromptData):
        return None
    names: set[str] = set()
    loaders: Sequence[object] = data.val_dataloader()  # A subclass may have others.
    for loader in loaders:
        if not isinstance(loader, EvaluationLoader):
            return None
        prompts = loader.prompts
        names |= {prompts.spec.label} if isinstance(prompts, RowPrompts) else {prompt.dataset for prompt in prompts}
    return sorted(names - {""})


def _check_name(option: str, name: str, logged: Logged) -> None:
    if name in logged.names:
        return
    today = tag(name) if name.partition("/")[0] in GROUP_OF else name  # Curves had no groups once.
    near = difflib.get_close_matches(today, logged.names, n=1) if logged.complete else _misspelt(name, logged.names)
    if not near and not logged.complete and name not in _MOVED:
        return
    if name in _MOVED:
        own = "" if logged.complete else " Give a metric of your own another name."
        hint = f"It is {_MOVED[name]} now.{own}"
    elif asked := re.fullmatch(r"val/(?:.*/)?pass_at_(\d+)", name):
        hint = f"Add {asked[1]} to `evaluation.pass_at`."
    elif near:
        others = [known for known in logged.names if not known.startswith("val/")]
        hint = (
            f"Did you mean {near[0]}? Callbacks see what validation measures, and {', '.join(others)}; no other curve."
        )
    else:
        hint = f"Callbacks see {', '.join(logged.names)}; no other curve."
    raise ValueError(f"{option} must be a metric that the run logs for callbacks, but got {name!r}. {hint}")


def _check_due(stopper: EarlyStopping, trainer: Trainer) -> None:
    """Check that a metric is there whenever it is asked for: with each validation."""
    whose, name = f"`monitor` of {type(stopper).__name__}", stopper.monitor
    if name.startswith("val/") and not trainer.enable_validation:
        raise ValueError(
            f"{whose} {name} needs a validation, but there is none. Give `data.val`, or monitor {_STEP[0]}."
        )
    starts = any(isinstance(callback, Evaluation) and callback.at_start for callback in callbacks_of(trainer))
    if name in _TRAINING and stopper.strict and starts and trainer.enable_validation:
        raise ValueError(
            f"{whose} {name} is not measured before the first step, but the validation there asks for it. Set "
            "`evaluation.at_start: false`, or monitor val/accuracy."
        )


def _misspelt(name: str, known: Iterable[str]) -> list[str]:
    """The known name that differs from this one by a letter or two, and neither in its numbers nor by an ending."""
    alike = [k for k in known if re.findall(r"\d+", k) == re.findall(r"\d+", name) and not name.startswith(k)]
    return difflib.get_close_matches(name, alike, n=1, cutoff=_NEARLY_THE_SAME)


def _check_filename(option: str, saver: ModelCheckpoint, logged: Logged) -> None:
    """Check the template of a checkpoint's name: Lightning writes 0 for a metric that does not exist."""
    if saver.filename is None:
        return
    for name in re.findall(r"\{(.*?)[:}]", saver.filename):
        _check_name(option, name, logged)
    whole = dict.fromkeys(("epoch", "step"), torch.tensor(0))
    try:
        saver.format_checkpoint_name(dict.fromkeys(logged.names, torch.tensor(0.0)) | whole)
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{option} must be a template such as '{{step}}-{{val/accuracy:.2f}}', but got {saver.filename!r} "
            f"({error}). Correct it."
        ) from None

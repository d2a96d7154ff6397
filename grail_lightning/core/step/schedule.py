"""The learning-rate schedule: whether it lasts for the run, before a model is loaded; and its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from grail_lightning.core.runtime.guard import explained, said, users_place
from grail_lightning.core.step.optimizer import idle_optimizer, options_of, trial_optimizer

_MOST_STEPS = 100_000  # That are rehearsed, within about a second. `max_steps` may stand for "without an end".


def advance(schedule: Any, num_steps: int) -> ValueError | None:
    """Step the schedule after `num_steps` optimiser steps; if it fails, the error with which the batch is to end."""

    def explain(error: BaseException) -> str:
        place = users_place(error)
        return (
            f"`scheduler` failed after optimiser step {num_steps:,}: {type(schedule).__name__} raised {said(error)}"
            f"{place and f' in {place}'}. This batch was trained to its end with the learning rate before."
        )

    try:
        with explained(explain):
            schedule.step()
    except ValueError as error:  # The only one: `explained` turns every other error into it.
        return error
    return None


def _planned_steps(trainer: Trainer, steps_per_batch: int) -> tuple[int, str] | None:
    """The optimiser steps of the run, those before a resume included, and the option that says so; None if unknown.

    The batches of an epoch are known of our data modules alone.
    """
    limits = [(trainer.max_steps, f"`trainer.max_steps` {trainer.max_steps}")] if trainer.max_steps >= 0 else []
    from grail_lightning.core.data.modules import PromptData

    epochs, data = trainer.max_epochs or -1, getattr(trainer, "datamodule", None)
    if epochs > 0 and isinstance(data, PromptData):
        batches, most = len(data.train_dataloader()), trainer.limit_train_batches
        batches = min(batches, most) if isinstance(most, int) else int(batches * most)
        limits.append((epochs * batches * steps_per_batch, f"`trainer.max_epochs` {epochs}, of {batches} batches each"))
    return min(limits, default=None)


def check_schedule(
    make_optimizer: Callable[[Any], Optimizer],
    make_schedule: Callable[[Any], Any] | None,
    trainer: Trainer,
    steps_per_batch: int,
) -> None:
    """Step the schedule, if there is one, through all optimiser steps of the run, without a model.

    Raises:
        ValueError: If the schedule raises before the run ends, as `OneCycleLR` does after its `total_steps`.
    """
    if make_schedule is None or (planned := _planned_steps(trainer, steps_per_batch)) is None:
        return
    num_steps, limit = planned
    optimizer = idle_optimizer(options_of(trial_optimizer(make_optimizer)))
    schedule, rates = make_schedule(optimizer), list[float]()

    def explain(error: BaseException) -> str:
        if place := users_place(error):  # It is no end of a schedule, but a fault of this code.
            return (
                f"`scheduler` must not fail, but {type(schedule).__name__} raised {said(error)} in {place}, after "
                f"optimiser step {len(rates):,} of a rehearsal without a model."
            )
        return (
            f"`scheduler` must last for the {num_steps:,} optimiser steps of the run ({limit}), but "
            f"{type(schedule).__name__} raised {said(error).rstrip('.')}, after optimiser step {len(rates):,}. Set its "
            "number of steps to that of the run, or end the run earlier."
        )

    with warnings.catch_warnings(), explained(explain):
        warnings.simplefilter("ignore")  # The run itself gives them.
        for _ in range(min(num_steps, _MOST_STEPS)):
            rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
            optimizer.step()
            schedule.step()
    for part in _parts(schedule):
        # The rate after the last step is used by none.
        if isinstance(part, CosineAnnealingLR) and part.last_epoch - 1 > part.T_max:
            rank_zero_warn(
                f"The learning rate of `CosineAnnealingLR` rises again after `T_max` {part.T_max} steps, but the "
                f"schedule is used for {part.last_epoch} ({limit}). Set `T_max` to {part.last_epoch}, or take "
                "`CosineAnnealingWarmRestarts` if it is to rise."
            )
    last = max((number for number, rate in enumerate(rates, start=1) if rate > 0), default=len(rates))
    if len(rates) - last > 1:
        rank_zero_warn(
            f"The learning rate is 0 after optimiser step {last:,} of {num_steps:,} ({limit}): the others change "
            "nothing. Let the schedule last for the whole run."
        )


def _parts(schedule: Any) -> Iterator[Any]:
    """A schedule, and those of which it is made, as `SequentialLR` and `ChainedScheduler` are."""
    yield schedule
    for value in vars(schedule).values():
        for part in value if isinstance(value, (list, tuple)) else ():
            if isinstance(part, LRScheduler):
                yield from _parts(part)

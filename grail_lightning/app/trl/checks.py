"""What does not go with token credit inside TRL's trainer: each is one clear line when the trainer is made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, overload

from packaging.version import Version

from grail_lightning.core.credit.base import CreditControl, TokenCredit
from grail_lightning.core.credit.service import with_inner
from grail_lightning.core.credit.tree import TreeAdvantage
from grail_lightning.core.credit.turns import GiGPO, TurnRewards
from grail_lightning.core.other_trainers.credit import check_services
from grail_lightning.core.records.task import Prompt, Task
from grail_lightning.gallery.critic import CriticSearch
from grail_lightning.gallery.spans import SpanScores

_OLDEST = "1.16"


def check_release() -> None:
    """Check that TRL is there, in a release whose loss takes advantages of tokens and has no Liger loss beside it."""
    needed = f"`grail_lightning.trl` needs TRL {_OLDEST} or later, but %s. Run: pip install 'grail-lightning[trl]'."
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ImportError(needed % "it is not installed") from None
    if Version(found) < Version(_OLDEST):
        raise ImportError(needed % f"got {found}")


def standardised(credit: TokenCredit) -> TokenCredit:
    """A copy whose terms are divided by the deviation of the group's rewards, as TRL divides advantages."""
    made = copy.copy(credit)
    if isinstance(made, TreeAdvantage | GiGPO):
        made.standardise = True
    elif (inner := getattr(made, "inner", None)) is not None:
        made.inner = standardised(inner)  # type: ignore[attr-defined]
    else:
        return credit
    return made


def check_run(trainer: Any) -> None:
    """Check the options of a trainer that is made, and its method; the attributes are those of `TokenCreditMixin`."""
    credit, control, args = trainer.credit, trainer.credit_control, trainer.args
    if control is not None and not isinstance(control, CreditControl):
        raise ValueError(
            f"`credit_control` must be an instance of `CreditControl`, but got {control!r:.80}. Call the class: "
            "credit_control=Shuffled()."
        )
    if trainer.credit_batch_size < 1:
        raise ValueError(f"`credit_batch_size` must be at least 1, but got {trainer.credit_batch_size}.")
    adapted = hasattr(trainer.model, "get_base_model")  # A `PeftModel`.
    check_services(credit, has_reference=trainer.ref_model is not None or adapted)
    _check_method(credit)
    _check_loss(trainer)
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % trainer.num_generations:
        raise ValueError(
            "`per_device_train_batch_size` times `steps_per_generation` must be a multiple of `num_generations`, so "
            f"that all completions of a prompt are on one rank, but got {rows} and {trainer.num_generations}. Raise "
            "`steps_per_generation`."
        )
    if credit.refresh == "step" and trainer.num_iterations * args.steps_per_generation > (
        args.gradient_accumulation_steps
    ):
        raise ValueError(
            f"`credit` must have `refresh` batch where a generation has several optimiser steps, but got "
            f"`{type(credit).__name__}` with step: TRL asks for the advantages of a generation once. Set it, or "
            "`num_iterations=1` and `steps_per_generation` to `gradient_accumulation_steps`."
        )
    if len(trainer.reward_funcs) > 1 and trainer.correct_func is None:
        for part in (credit, control):
            if part is not None and part.reads_correct:
                raise ValueError(
                    f"`correct_func` must be given with `{type(part).__name__}`, which reads which completions are "
                    f"right, and {len(trainer.reward_funcs)} reward functions, whose sum does not say it. Give a "
                    "function in the form of a reward function that returns True for right ones."
                )
    if credit.runs_policy:
        _check_model(trainer)
    _check_prompts(trainer)


def _check_method(credit: TokenCredit) -> None:
    for part in with_inner(credit):
        judged = isinstance(part, SpanScores) and part.judge is not None
        if isinstance(part, TurnRewards | CriticSearch) or judged:
            raise ValueError(
                f"`credit` must be a method that reads no scores of turns, but got `{type(part).__name__}`: in TRL's "
                "environments every public method is a tool of the policy, so that none can score a turn. Train with "
                "`GrailModule` and an `EnvironmentTask`, or take `GiGPO` or `IGPO`."
            )


def _check_loss(trainer: Any) -> None:
    args = trainer.args
    if trainer.importance_sampling_level != "token":
        raise ValueError(
            "`importance_sampling_level` must be token with token credit, but got "
            f"{trainer.importance_sampling_level}: TRL's ratio of a sequence spreads each token's advantage over the "
            "whole completion. Set it to token, or train with `GSPOToken` of this package."
        )
    if trainer.off_policy_mask_threshold is not None:
        raise ValueError(
            "`off_policy_mask_threshold` must be None with token credit, but got "
            f"{trainer.off_policy_mask_threshold}: the mask asks for the sign of a completion's advantage, and tokens "
            "of one completion may differ in it."
        )
    if getattr(args, "use_liger_loss", False):
        raise ValueError(
            "`use_liger_loss` must be False with token credit, but got True: that loss takes one advantage for each "
            "completion."
        )


def _check_model(trainer: Any) -> None:
    """Check that the model can be run outside of TRL's own calls of it."""
    args, name = trainer.args, f"`{type(trainer.credit).__name__}`"
    remedy = "Take a method without a pass of the model, such as `TreeAdvantage`"
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            f"`credit` must be a method without a pass of the model under ZeRO-3, whose weights are not whole, but got "
            f"{name}. {remedy}, or ZeRO-2."
        )
    sharding = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if sharding is not None and sharding.fsdp_version == 1:
        raise ValueError(
            f"`credit` must be a method without a pass of the model under FSDP1, but got {name}. {remedy}, or set "
            "`fsdp_version: 2`."
        )
    if trainer.tools and hasattr(trainer.processing_class, "image_processor"):
        raise ValueError(
            f"`credit` must be a method without a pass of the model where results of tools may be pictures, but got "
            f"{name}. {remedy}."
        )


class _Prompts(Sequence[Prompt]):
    """The prompts of TRL's dataset, each made when it is asked for."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return len(self._trainer.train_dataset)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        row = self._trainer.train_dataset[index]
        made: Prompt = self._trainer.credit_prompt(row, row.get("prompt", ""))
        return made

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))


def _check_prompts(trainer: Any) -> None:
    """Check the columns that the method reads, and what it says of the prompts; a streamed dataset cannot be read."""
    task: object = trainer.credit_task
    if not isinstance(task, Task):
        raise ValueError(
            f"`credit_task` must be an instance of `Task`, but got {task!r:.80}. Call the class: "
            "credit_task=ArithmeticTask()."
        )
    columns = trainer.train_dataset.column_names
    if columns is not None and trainer.credit.reads_reference and trainer.reference_column not in columns:
        raise ValueError(
            "`reference_column` must name the column with the reference answer, which "
            f"`{type(trainer.credit).__name__}` reads, but got {trainer.reference_column!r}, and the dataset has "
            f"{', '.join(columns)}. Name one of them."
        )
    if hasattr(trainer.train_dataset, "__len__") and (remark := trainer.credit.check_prompts([_Prompts(trainer)])):
        warnings.warn(remark, stacklevel=2)

"""The base class of the data modules: sharded loaders of prompts, whose training position checkpoints keep.

It also finds the prompts that are too long for the policy, before the policy is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning.core.data.loaders import Curriculum, EvaluationLoader, GivenLoader, PromptSet, TrainingLoader
from grail_lightning.core.data.rows import RowPrompts, check_pictures
from grail_lightning.core.records.picture import Messages
from grail_lightning.core.records.task import Prompt, problem_id
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.core.runtime.collectives import rank, world_size
from grail_lightning.core.runtime.seeds import derive_seed, run_seed
from grail_lightning.core.tasks.answered import AnswerTask

Encode = Callable[[Messages | str], Sequence[int]]
Split = Literal["train", "val", "test", "predict"]

STAGES: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}

_AT_BORDERS = 4  # A text may be cut into a few tokens more or less where it meets its neighbours.
_MOST_NAMED = 5


@dataclass(frozen=True)
class PromptLimit:
    """The largest length of a prompt: `max_prompt_length`, or what the longest response leaves of the context."""

    given: int | None  # The option `max_prompt_length`.
    context: int | None  # The room for prompt and response together in tokens; None if that is not known.
    response: int = 0  # The largest length of a response,
    option: str = "sampling.max_response_length"  # and the option that sets it.

    @property
    def tokens(self) -> int | None:
        """The limit in tokens; None if there is none."""
        room = None if self.context is None else max(self.context - self.response, 0)
        return min((n for n in (self.given, room) if n is not None), default=None)

    def exceeded(self, prompts: Sequence[Prompt], name: str, lengths: Mapping[int, int]) -> str:
        """Which prompts of a dataset are too long, by file and line where they have one, and for which options.

        `lengths` are those of the long prompts, by their numbers.
        """
        named = []
        for number, length in list(lengths.items())[:_MOST_NAMED]:
            place = f"prompt {number + 1}"
            if isinstance(prompts, RowPrompts):
                name = prompts.table.source
                place = prompts.table.place(prompts.indices[number]).removeprefix(f"{name}, ")
            named.append(f"{place} ({length:,} tokens)")
        more = [f"and {len(lengths) - _MOST_NAMED:,} more"] if len(lengths) > _MOST_NAMED else []
        return (
            f"{len(lengths):,} of {len(prompts):,} prompts of {name} are longer than {self.tokens:,} tokens, the "
            f"smaller of `data.max_prompt_length` {self.given} and the context {self.context} less `{self.option}` "
            f"{self.response}: {', '.join([*named, *more])}. The longest has {max(lengths.values()):,} tokens."
        )


def long_prompts(prompts: Sequence[Prompt], encode: Encode, most: int) -> dict[int, int]:
    """The lengths of the prompts of more than `most` tokens, by their numbers from 0.

    A token stands for at least one byte, so that a prompt of few bytes need not be tokenised.
    """
    around: dict[tuple[str, ...], int] = {}  # The tokens of the chat template, by the roles of a conversation.
    lengths = {}
    for number, prompt in enumerate(prompts):
        messages = prompt.messages
        turns = [{"role": "", "content": messages}] if isinstance(messages, str) else messages
        if all(isinstance(turn["content"], str) for turn in turns):  # Without pictures.
            roles = tuple(turn["role"] for turn in turns)
            if roles not in around:
                blank = "." if isinstance(messages, str) else [turn | {"content": "."} for turn in turns]
                around[roles] = len(encode(blank))
            if around[roles] + sum(len(turn["content"].encode()) + _AT_BORDERS for turn in turns) <= most:
                continue
        if (length := len(encode(messages))) > most:
            lengths[number] = length
    return lengths


def _leave_out_long(
    prompts: PromptSet, encode: Encode, limit: PromptLimit, overlong: Literal["drop", "error"]
) -> PromptSet:
    """The training prompts that are not too long; a warning names the others, or an error if `overlong` says so."""
    every = prompts.prompts
    lengths = {} if limit.tokens is None else long_prompts(every, encode, limit.tokens)
    if not lengths:
        return prompts
    message = limit.exceeded(every, prompts.name, lengths)
    if overlong == "error":
        raise ValueError(f"{message} Raise the limit, or set `data.overlong: drop`.")
    if len(lengths) == len(every):
        raise ValueError(f"{message} None is left.")
    rank_zero_warn(f"{message} Training leaves out longer prompts.")
    short = [number for number in range(len(every)) if number not in lengths]
    difficulty = [prompts.difficulty[number] for number in short] if prompts.difficulty else ()
    if isinstance(every, RowPrompts):
        return replace(prompts, prompts=every.take([every.indices[number] for number in short]), difficulty=difficulty)
    return replace(prompts, prompts=[every[number] for number in short], difficulty=difficulty)


def check_held_out(prompts: Sequence[Prompt], encode: Encode, limit: PromptLimit) -> None:
    """Check that all prompts of an evaluation can be answered; an accuracy without some would be of other problems."""
    lengths = {} if limit.tokens is None else long_prompts(prompts, encode, limit.tokens)
    if lengths:
        message = limit.exceeded(prompts, prompts[0].dataset, lengths)
        raise ValueError(f"{message} An evaluation leaves no problem out: raise the limit, or remove such rows.")


class PromptData(pl.LightningDataModule, ABC):
    """The base class of the data modules: sharded loaders, and a training position that checkpoints keep.

    A subclass returns the prompts of a split from `load`. The order of training prompts depends on the run's seed
    (`seed_everything`) and on nothing else. Training prompts that are too long for the model are left out, with a
    warning that names them; those of an evaluation are an error.

    Set the attribute `encode` (messages -> token ids) to measure lengths without a trainer.

    Attributes:
        disjoint_splits: Whether no two splits have a problem in common, by the way in which they are made.

    Args:
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
    """

    disjoint_splits: ClassVar[bool] = False

    def __init__(self, prompts_per_batch: int, eval_prompts_per_batch: int) -> None:
        super().__init__()
        self.prompts_per_batch, self.eval_prompts_per_batch = prompts_per_batch, eval_prompts_per_batch
        check_options(self, prompts_per_batch="[1, inf)", eval_prompts_per_batch="[1, inf)")
        self.curriculum: Curriculum | None = None
        self.max_prompt_length: int | None = None
        self.overlong: Literal["drop", "error"] = "drop"
        self.encode: Encode | None = None
        self._training: TrainingLoader | None = None
        self._evaluation: dict[Split, list[EvaluationLoader]] = {}

    @abstractmethod
    def load(self, split: Split) -> list[PromptSet]:
        """The datasets of a split; the list may be empty."""

    def setup(self, stage: str) -> None:
        """Load the datasets of a stage, before the model is loaded, so that errors in the data show early."""
        trainer = self.trainer
        number, ranks = (trainer.global_rank, trainer.world_size) if trainer else (rank(), world_size())
        for split in STAGES[stage]:
            sets = self.load(split)
            for part in sets:
                check_pictures(part.prompts)
            if not sets and not (stage == "fit" and split == "val"):
                raise ValueError(f"`{TrainerFn(stage).value}` needs `data.{split}`, but no dataset was given for it.")
            _check_rewards(sets)
            if split == "val":
                self._validate_with(sets)
            if split == "train":
                seed = derive_seed(run_seed(), "data")
                sets = _overfitted([self._fitting(part) for part in sets], trainer, self.prompts_per_batch)
                _check_filled(sets, self.prompts_per_batch)
                self._training = TrainingLoader(sets, self.prompts_per_batch, seed, number, ranks, self.curriculum)
            else:
                size = self.eval_prompts_per_batch
                kind = GivenLoader if split == "predict" else EvaluationLoader
                self._evaluation[split] = [kind(_numbered(s.prompts), size, number, ranks) for s in sets]

    def _validate_with(self, sets: list[PromptSet]) -> None:
        """Tell Lightning whether there is validation: it looks whether the method is overridden.

        With an empty list it validates nothing, and saves that wait for the end of a validation are never made.
        """
        vars(self).pop("val_dataloader", None)
        if not sets:
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]

    def _fitting(self, prompts: PromptSet) -> PromptSet:
        module: Any = getattr(self.trainer, "lightning_module", None)
        encoder = getattr(module, "prompt_encoder", None)
        encode = self.encode or (encoder and prompts.prompts and encoder(prompts.prompts[0].task))
        response = getattr(getattr(module, "sampling", None), "max_response_length", 0)
        limit = PromptLimit(self.max_prompt_length, getattr(module, "context_length", None), response)
        if not encode:
            if self.max_prompt_length is not None:
                rank_zero_warn(
                    f"`max_prompt_length` was not applied to {prompts.name}: without a trainer there is no tokenizer "
                    "to measure with. Set the attribute `encode` of the data module."
                )
            return prompts
        return _leave_out_long(prompts, encode, limit, self.overlong)

    def train_dataloader(self) -> TrainingLoader:
        """The training loader, the same for the whole fit, so that each epoch continues at its position."""
        assert self._training is not None, "call `setup('fit')` first"
        self._training.prompts_per_batch = self.prompts_per_batch  # Lightning's BatchSizeFinder sets it after `setup`.
        return self._training

    def val_dataloader(self) -> list[EvaluationLoader]:
        """One loader a dataset."""
        return self._evaluation.get("val", [])

    def test_dataloader(self) -> list[EvaluationLoader]:
        """One loader a dataset."""
        return self._evaluation.get("test", [])

    def predict_dataloader(self) -> list[EvaluationLoader]:
        """One loader a dataset."""
        return self._evaluation.get("predict", [])

    def state_dict(self) -> dict[str, Any]:
        """The training position. The loader keeps it, too, but Lightning restores a loader only inside an epoch."""
        return {} if self._training is None else {"train": self._training.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the training position if there is training."""
        if self._training is not None and "train" in state_dict:
            self._training.load_state_dict(state_dict["train"])


def _numbered(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts of an evaluation. In an environment equal ones are counted, so that each has its own random seed.

    Prompts whose responses are given need none.
    """
    if not prompts or not prompts[0].task.has_environment or "response" in prompts[0].columns:
        return prompts
    earlier, numbered = Counter[str](), []
    for prompt in prompts:
        name = problem_id(prompt)
        numbered.append(replace(prompt, occurrence=earlier[name]) if earlier[name] else prompt)
        earlier[name] += 1
    return numbered if earlier.total() > len(earlier) else prompts


def _check_rewards(sets: list[PromptSet]) -> None:
    """Check that the first prompts of the sets have the columns that their tasks' rewards ask for."""
    first = [prompt for s in sets for prompt in s.first(100).prompts]  # Rows of a JSON file may differ in columns.
    for task in {id(prompt.task): prompt.task for prompt in first}.values():
        if isinstance(task, AnswerTask):
            task.check_columns({name for prompt in first if prompt.task is task for name in prompt.columns})


def _check_filled(sets: list[PromptSet], prompts_per_batch: int) -> None:
    """Check that there are prompts; a warning if there are too few for one batch."""
    number = sum(len(part.prompts) for part in sets)
    if not number:
        raise ValueError("Training needs at least one prompt, but `load` of the data module gave none.")
    if number < prompts_per_batch:
        rank_zero_warn(
            f"`data.prompts_per_batch` is {prompts_per_batch}, but there are only {number} training prompts: an epoch "
            f"is one batch of {number}. Set it to {number} or less, or give more problems."
        )


def _overfitted(sets: list[PromptSet], trainer: pl.Trainer | None, prompts_per_batch: int) -> list[PromptSet]:
    """The first prompts of each set if `Trainer(overfit_batches=k)` asks for the same k batches in every epoch."""
    batches: int | float = getattr(trainer, "overfit_batches", 0)
    if not batches:
        return sets
    if isinstance(batches, float):
        return [s.first(max(int(len(s.prompts) * batches), 1)) for s in sets]
    weights = list(accumulate((s.weight for s in sets), initial=0.0))
    ends = [round(batches * prompts_per_batch * weight / weights[-1]) for weight in weights]
    return [s.first(stop - start) for s, (start, stop) in zip(sets, pairwise(ends), strict=True) if stop > start]

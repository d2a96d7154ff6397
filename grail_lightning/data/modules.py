"""The data modules, which turn datasets of problems into loaders of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from grail_lightning.data.loaders import EvaluationLoader, PromptSet, TrainingLoader
from grail_lightning.data.names import metric_names
from grail_lightning.data.rows import RowPrompts, prompt_of, within_length
from grail_lightning.data.sources import DatasetSpec, check_path, read_table, select_rows
from grail_lightning.runtime.collectives import world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.tasks.arithmetic import ArithmeticTask
from grail_lightning.tasks.base import Messages, Task
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.problems import ProblemSpace
from grail_lightning.tasks.problems import Split as ProblemSplit

Split = Literal["train", "val", "test", "predict"]
# jsonargparse needs `Path` here. If a file is given for a class or a list of classes, it takes the file's content as
# the option, unless the type includes paths.
Datasets: TypeAlias = str | Path | DatasetSpec | list[str | Path | DatasetSpec] | None

_STAGES: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}


class PromptData(pl.LightningDataModule, ABC):
    """The base class of the data modules: sharded loaders, and a training position that checkpoints keep.

    A subclass returns the prompts of a split from `load`. The order of training prompts depends on the run's seed
    (`seed_everything`) and on nothing else.

    Args:
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
    """

    def __init__(self, prompts_per_batch: int, eval_prompts_per_batch: int) -> None:
        super().__init__()
        sizes = {"prompts_per_batch": prompts_per_batch, "eval_prompts_per_batch": eval_prompts_per_batch}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {size}.")
        self.prompts_per_batch, self.eval_prompts_per_batch = prompts_per_batch, eval_prompts_per_batch
        self._training: TrainingLoader | None = None
        self._evaluation: dict[Split, list[EvaluationLoader]] = {}

    @abstractmethod
    def load(self, split: Split) -> list[PromptSet]:
        """The datasets of a split; the list may be empty."""

    def setup(self, stage: str) -> None:
        """Load the datasets of a stage. This happens before the model is loaded, so that errors in the data show early.

        Raises:
            ValueError: If the stage has no data.
        """
        rank, ranks = _placement(self.trainer)
        for split in _STAGES[stage]:
            sets = self.load(split)
            if not sets and not (stage == "fit" and split == "val"):
                raise ValueError(f"`{TrainerFn(stage).value}` needs `data.{split}`, but no dataset was given for it.")
            if split == "train":
                seed = derive_seed(run_seed(), "data")
                sets = _overfitted(sets, self.trainer, self.prompts_per_batch)
                self._training = TrainingLoader(sets, self.prompts_per_batch, seed, rank, ranks)
            else:
                size = self.eval_prompts_per_batch
                self._evaluation[split] = [EvaluationLoader(s.prompts, size, rank, ranks) for s in sets]

    def train_dataloader(self) -> TrainingLoader:
        """The training loader, the same for the whole fit, so that each epoch continues at its position."""
        assert self._training is not None, "call `setup('fit')` first"
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


class MathData(PromptData):
    r"""Problems with reference answers, from files or the hub.

    Each dataset is a `DatasetSpec` or a path. The four arguments for datasets take one or a list::

        train: [{path: train.jsonl}, {path: zwhe99/DeepMath-103K, problem: question, answer: final_answer, weight: 3}]
        val: {path: math500.jsonl, limit: 100}

    Several training datasets are mixed in proportion to their weights; an epoch has as many draws as there are
    problems. Evaluation datasets are reported separately, under their names. Prompts are made together with each
    batch, so that a large table stays on disk.

    Set the attribute `encode` (messages -> token ids) to measure lengths without a trainer. The attribute
    `num_overlong` holds the number of prompts that were left out, by split and name.

    Args:
        train: Training datasets.
        val: Validation datasets.
        test: Test datasets.
        predict: Datasets for `predict`. The responses of a column `response` are used instead of sampled ones.
        task: The task, which makes prompts of rows and rewards answers; default `MathTask`.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        max_prompt_length: The largest number of tokens of a prompt, chat template included; None is no limit. No
            prompt is ever cut.
        overlong: The treatment of longer prompts: `drop` leaves them out and logs a count, `error` raises.

    Raises:
        ValueError: If a file is missing, two datasets of a split have one name, or a number is out of range; in `setup`
            if a row is malformed, lacks a named column, or has an empty problem or answer, with file and line.
    """

    def __init__(
        self,
        train: Datasets = None,
        val: Datasets = None,
        test: Datasets = None,
        predict: Datasets = None,
        task: Task | None = None,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 64,
        max_prompt_length: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
    ) -> None:
        super().__init__(prompts_per_batch, eval_prompts_per_batch)
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"`max_prompt_length` must be at least 1 token, but got {max_prompt_length}.")
        if overlong not in ("drop", "error"):
            raise ValueError(f"`overlong` must be drop or error, but got {overlong!r}.")
        self.task = task or MathTask()
        self.max_prompt_length, self.overlong = max_prompt_length, overlong
        self.encode: Callable[[Messages | str], Sequence[int]] | None = None
        self.num_overlong: dict[str, int] = {}
        self.specs: dict[Split, list[DatasetSpec]] = {
            "train": _as_list(train),
            "val": _as_list(val),
            "test": _as_list(test),
            "predict": _as_list(predict),
        }
        for split, specs in self.specs.items():
            _check_names(split, specs)
            for spec in specs:
                check_path(spec)
        if not self.specs["val"]:
            # Lightning checks whether the method is overridden. For an empty list it would warn and validate nothing.
            self.val_dataloader = super(PromptData, self).val_dataloader  # type: ignore[method-assign]

    def prepare_data(self) -> None:
        """Download the datasets of the stage, once per machine."""
        stage = str(self.trainer.state.fn.value) if self.trainer and self.trainer.state.fn else "fit"
        for split in _STAGES[stage]:
            for spec in self.specs[split]:
                if not spec.is_file:
                    read_table(spec)

    def load(self, split: Split) -> list[PromptSet]:
        """Read, filter and check the datasets of a split."""
        return [self._load_one(split, spec) for spec in self.specs[split]]

    def _load_one(self, split: Split, spec: DatasetSpec) -> PromptSet:
        table = read_table(spec)
        prompts = RowPrompts(table, select_rows(table, spec), spec, self.task)
        if self.max_prompt_length is None:
            return PromptSet(spec.label, prompts, spec.weight)
        encode = self.encode or getattr(getattr(self.trainer, "lightning_module", None), "encode", None)
        if encode is None:
            rank_zero_warn(
                f"`max_prompt_length` was not applied to {spec.path}: without a trainer there is no tokenizer to "
                "measure with. Set the attribute `encode` of the data module."
            )
            return PromptSet(spec.label, prompts, spec.weight)
        kept = within_length(prompts, encode, self.max_prompt_length, self.overlong)
        self.num_overlong[f"{split}/{spec.label}"] = dropped = len(prompts) - len(kept)
        if dropped:
            rank_zero_info(
                f"{spec.path}: left out {dropped} of {len(prompts)} prompts, "
                f"longer than `max_prompt_length` {self.max_prompt_length}."
            )
        return PromptSet(spec.label, kept, spec.weight)


class ArithmeticData(PromptData):
    """Generated chains of additions and subtractions, with a label for every step of a response.

    Training, validation and test problems are disjoint, whatever the seeds and sizes. Prediction uses the test split.

    Args:
        num_train: The number of training problems.
        num_val: The number of validation problems.
        num_test: The number of test problems.
        problems: The space of problems: numbers of terms, operands and operators.
        seed: The seed that selects the problems. It is not the run's seed, so that runs with different seeds are tested
            on the same problems.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        task: The task, which makes prompts of problems and rewards answers; default `ArithmeticTask`.

    Raises:
        ValueError: If a number is out of range; in `setup` if there are fewer such problems than asked for.
    """

    def __init__(
        self,
        num_train: int = 20_000,
        num_val: int = 512,
        num_test: int = 512,
        problems: ProblemSpace = ProblemSpace(),  # noqa: B008  (frozen)
        seed: int = 0,
        prompts_per_batch: int = 32,
        eval_prompts_per_batch: int = 128,
        task: ArithmeticTask | None = None,
    ) -> None:
        super().__init__(prompts_per_batch, eval_prompts_per_batch)
        for name, number in (("num_train", num_train), ("num_val", num_val), ("num_test", num_test)):
            if number < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {number}.")
        self.problems, self.seed = problems, seed
        self.sizes: dict[Split, int] = {"train": num_train, "val": num_val, "test": num_test, "predict": num_test}
        self.task = task or ArithmeticTask()

    def load(self, split: Split) -> list[PromptSet]:
        """Draw the problems of a split."""
        names: dict[Split, ProblemSplit] = {"train": "train", "val": "validation", "test": "test", "predict": "test"}
        drawn = self.problems.sample(self.sizes[split], names[split], self.seed)
        return [PromptSet("arithmetic", [prompt_of(self.task, {"problem": p.expression}) for p in drawn])]


def _placement(trainer: pl.Trainer | None) -> tuple[int, int]:
    """The rank of this process and the number of ranks."""
    if trainer is not None:
        return trainer.global_rank, trainer.world_size
    return (torch.distributed.get_rank() if world_size() > 1 else 0), world_size()


def _overfitted(sets: list[PromptSet], trainer: pl.Trainer | None, prompts_per_batch: int) -> list[PromptSet]:
    """The first prompts of each set if `Trainer(overfit_batches=k)` asks for the same k batches in every epoch."""
    batches: int | float = getattr(trainer, "overfit_batches", 0)
    if not batches:
        return sets
    keep = [int(len(s.prompts) * batches) if isinstance(batches, float) else batches * prompts_per_batch for s in sets]
    return [PromptSet(s.name, s.prompts[: max(n, 1)], s.weight) for s, n in zip(sets, keep, strict=True)]


def _as_list(datasets: Datasets) -> list[DatasetSpec]:
    given = datasets if isinstance(datasets, list) else [] if datasets is None else [datasets]
    return [spec if isinstance(spec, DatasetSpec) else DatasetSpec(str(spec)) for spec in given]


def _check_names(split: Split, specs: list[DatasetSpec]) -> None:
    names = [spec.label for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"The datasets of `{split}` must have different names, but got {', '.join(twice)} more than once. "
            "Set `name` of one of them."
        )
    metric_names(names)

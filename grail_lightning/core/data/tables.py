"""Data modules over tables of problems with reference answers: files, the hub, generated rows, kept rollouts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning.core.data.loaders import Curriculum, PromptSet
from grail_lightning.core.data.modules import STAGES, PromptData, Split
from grail_lightning.core.data.rows import (
    Example,
    FewShot,
    RowPrompts,
    problem_and_answer,
    read_examples,
    with_examples,
)
from grail_lightning.core.data.selection import select_rows, with_prompt_column
from grail_lightning.core.data.sources import (
    DatasetSpec,
    Table,
    check_path,
    in_folder,
    is_local,
    metric_names,
    read_table,
    with_chart_columns,
    with_columns_of,
)
from grail_lightning.core.records.columns import TRAINING, Row, read_rows
from grail_lightning.core.records.picture import FIRST_PICTURE_ID, has_pictures
from grail_lightning.core.records.task import Prompt, Task
from grail_lightning.core.runtime.checks import check_option
from grail_lightning.core.runtime.files import looked_in
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.core.tasks.answered import MathTask


@dataclass(frozen=True)
class Kept:
    """The newest rollouts that the callback `KeepRollouts` wrote, while the run goes on or afterwards.

    Args:
        newest: The largest number of rollouts. Groups are not cut, unless the newest one has more.
        folder: The folder of the files; default ``rollouts`` in the folder of the run.
    """

    newest: int = 200
    folder: str | None = None

    def __post_init__(self) -> None:
        check_option("data.kept.newest", self.newest, "[1, inf)")


def kept_rollouts(kept: Kept, task: Task, trainer: Trainer | None) -> list[PromptSet]:
    """The newest kept rollouts of each dataset, which the task grades again.

    Each is a prompt with the columns `response`, `response_ids`, `finished`, `response_group` and, with an environment,
    `response_turns`, `prompt_ids` and `episode`, which `predict` takes instead of sampling.
    """
    folder = Path(kept.folder or "rollouts")
    if kept.folder is None and trainer is not None:
        folder = RunFolder(trainer).path / folder
    files = sorted(folder.glob("step_*_rank_*.parquet"), reverse=True)
    if trainer is not None:  # The run goes on writing: all ranks read the files that the first one sees.
        files = trainer.strategy.broadcast(files)
    if not files:
        raise ValueError(
            f"`data.kept` needs rollouts that a training run kept, but {folder} holds none. Train with "
            f"`--trainer.callbacks+=KeepRollouts`, or name another `data.kept.folder` ({looked_in()})."
        )
    by_dataset: dict[str, list[Prompt]] = {}
    for row in _newest(files, kept.newest):
        response = {"response": row["response"], "response_ids": row["token_ids"], "finished": row["finished"]}
        response["response_group"] = row["file"], row["group"]
        if row["turns"] is not None:
            response |= {"response_turns": row["turns"], "prompt_ids": row["prompt_ids"], "episode": row["episode"]}
        messages = row["messages"]
        if has_pictures(messages) or max(row["token_ids"], default=0) >= FIRST_PICTURE_ID:
            raise ValueError("`data.kept` cannot read rollouts with pictures, which are not kept with them.")
        prompt = Prompt(
            messages=messages,
            reference=row["reference"],
            task=task,
            columns=row["columns"] | response,
            dataset=row["dataset"],
        )
        by_dataset.setdefault(prompt.dataset, []).append(prompt)
    return [PromptSet(name, prompts) for name, prompts in by_dataset.items()]


def _newest(files: list[Path], number: int) -> list[Row]:
    """Rows of the newest files, in whole groups."""
    newest: list[Row] = []
    for file in files:
        for _, rows in groupby(read_rows(file, TRAINING), key=lambda row: row["group"]):
            group = [row | {"file": file.name} for row in rows]
            if len(newest) + len(group) > number:
                return newest or group[:number]
            newest += group
    return newest


# jsonargparse needs `Path` here. If a file is given for a class or a list of classes, it takes the file's content as
# the option, unless the type includes paths. They come last, because it would write any value as text for them.
if TYPE_CHECKING:
    from grail_lightning.core.data.sources import Rows

    Datasets: TypeAlias = str | DatasetSpec | Path | Rows | Sequence[str | DatasetSpec | Path | Rows] | None
else:
    Datasets: TypeAlias = str | DatasetSpec | list[str | DatasetSpec | Path] | Path | None


class TableData(PromptData):
    """The base class of data modules over tables. A subclass returns the tables of a split from `tables`.

    The arguments are those of `MathData`.
    """

    def __init__(
        self,
        task: Task,
        prompts_per_batch: int,
        eval_prompts_per_batch: int,
        max_prompt_length: int | None = None,
        overlong: Literal["drop", "error"] = "drop",
        few_shot: FewShot | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(prompts_per_batch, eval_prompts_per_batch)
        check_option("max_prompt_length", 1 if max_prompt_length is None else max_prompt_length, "[1, inf)")
        check_option("overlong", overlong, Literal["drop", "error"])
        self.task, self.few_shot, self.curriculum, self.kept = task, few_shot, curriculum, kept
        self.max_prompt_length, self.overlong = max_prompt_length, overlong

    @abstractmethod
    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The tables of a split, each with its name, its columns and the filter of its rows."""

    def load(self, split: Split) -> list[PromptSet]:
        """Read, filter and check the datasets of a split."""
        if split == "predict" and self.kept is not None:
            return kept_rollouts(self.kept, self.task, self.trainer)
        examples = self._examples
        tables = [(with_prompt_column(spec, table, self.task), table) for spec, table in self.tables(split)]
        return [self._load_one(split, spec, table, examples) for spec, table in tables]

    @cached_property  # The table that holds them may be large, and every split has the same.
    def _examples(self) -> list[Example]:
        if self.few_shot is None:
            return []
        if self.few_shot.dataset is not None:
            (spec,) = _as_specs(self.few_shot.dataset)
            table = read_table(spec)
        else:
            tables = self.tables("train")
            if not tables:
                raise ValueError(
                    "`few_shot.dataset` must name the dataset with the worked examples, because there is no `train`."
                )
            spec, table = tables[0]
        spec = with_prompt_column(spec, table, self.task)
        return read_examples(self.few_shot, spec, table, self._select(table, spec), self.task)

    def _select(self, table: Table, spec: DatasetSpec) -> list[int]:
        return select_rows(table, spec, self.task)

    def _load_one(self, split: Split, spec: DatasetSpec, table: Table, examples: list[Example]) -> PromptSet:
        # The prompt of a row that serves as an example would contain its own answer.
        used = {example.row for example in examples if example.source == spec.source}
        if example_problems := [example.problem for example in examples if None not in example.problem]:
            every = enumerate(table.columns([spec.problem, spec.answer]))
            used |= {index for index, row in every if problem_and_answer(row, spec) in example_problems}
        selected = self._select(table, spec)
        rows = [row for row in selected if row not in used]
        if not rows:
            raise ValueError(f"All rows of {spec.path} serve as worked examples. Use fewer, or more rows.")
        if split != "train" and (fewer := len(selected) - len(rows)):
            rank_zero_warn(
                f"{fewer:,} of the {len(selected):,} rows of {spec.label} are left out of `data.{split}`, because they "
                "serve as worked examples, or have the same problem and answer: figures are of the others. Take "
                "examples from another dataset (`few_shot.dataset`) to evaluate all rows."
            )
        change = partial(with_examples, examples=examples, few_shot=self.few_shot) if self.few_shot else None
        prompts = RowPrompts(table, rows, spec, self.task, change)
        if remark := self.task.check_prompts(prompts):
            rank_zero_warn(f"{spec.path}: {remark}")
        if split != "train" or self.curriculum is None:
            return PromptSet(spec.label, prompts, spec.weight)
        difficulty = _difficulty(self.curriculum.column, table, prompts.indices)
        return PromptSet(spec.label, prompts, spec.weight, difficulty)


def _difficulty(column: str, table: Table, indices: Sequence[int]) -> list[float]:
    """The difficulty of the selected rows, whose indices ascend."""
    selected, difficulty = set(indices), []
    for index, row in enumerate(table.columns([column])):
        value = row.get(column) if index in selected else 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"{table.place(index)}: `{column}` must be a finite number (int or float), the difficulty that "
                f"`curriculum.column` names, but got {value!r}. The columns are: "
                f"{', '.join(map(str, table.rows[index]))}."
            )
        if index in selected:
            difficulty.append(float(value))
    return difficulty


class MathData(TableData):
    r"""Problems with reference answers, from files or the hub.

    Each dataset is a `DatasetSpec` or a path; from Python also a list of dicts or a `datasets.Dataset`. The four
    arguments for datasets take one or a list::

        train: [{path: train.jsonl}, {path: zwhe99/DeepMath-103K, problem: question, answer: final_answer, weight: 3}]
        val: {path: math500.jsonl, limit: 100}

    Several training datasets are mixed in proportion to their weights; an epoch has as many draws as there are
    problems. Evaluation datasets are reported separately, under their names. Prompts are made together with each
    batch, so that a large table stays on disk.

    Args:
        train: Training datasets.
        val: Validation datasets.
        test: Test datasets.
        predict: Datasets for `predict`. The responses of a column `response` are used instead of sampled ones.
        task: The task, which makes prompts of rows and rewards answers; default `MathTask`.
        prompts_per_batch: The number of prompts in a training batch, over all ranks.
        eval_prompts_per_batch: The same for validation, test and prediction.
        max_prompt_length: The largest number of tokens of a training prompt, chat template and examples included;
            None is what `sampling.max_response_length` leaves of the model's context. No prompt is ever cut.
        overlong: The treatment of longer prompts: `drop` leaves them out and warns, `error` raises. Both name them.
        few_shot: Worked examples before each question; none by default.
        curriculum: Easy problems first, by a column; by default all problems from the beginning.
        kept: For `predict`: rollouts that a training run kept, instead of the data; None for the data.
        folder: A folder with a copy of each dataset of the hub, which is read instead: ``NAME.jsonl``, ``.json`` or
            ``.parquet``. Its columns are those that the dataset names, or `problem` and `answer`. A `path` that is a
            file or a folder here is read as it is.
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
        few_shot: FewShot | None = None,
        curriculum: Curriculum | None = None,
        kept: Kept | None = None,
        folder: str | None = None,
    ) -> None:
        sizes = prompts_per_batch, eval_prompts_per_batch
        super().__init__(task or MathTask(), *sizes, max_prompt_length, overlong, few_shot, curriculum, kept)
        self.folder, self._copies = folder, set[str]()
        splits: dict[Split, Datasets] = {"train": train, "val": val, "test": test, "predict": predict}
        self.specs = {split: _as_specs(datasets) for split, datasets in splits.items()}
        _check_splits([spec for specs in self.specs.values() for spec in specs], folder)
        if folder is not None:
            local = {spec.path for specs in self.specs.values() for spec in specs if is_local(spec)}
            self.specs = {split: [in_folder(spec, folder) for spec in specs] for split, specs in self.specs.items()}
            self._copies = {spec.path for specs in self.specs.values() for spec in specs} - local
        for split, specs in self.specs.items():
            metric_names(spec.label for spec in specs)
            for spec in specs:
                check_path(spec, f"data.{split}")

    def prepare_data(self) -> None:
        """Download the datasets of the stage, once per machine."""
        stage = str(self.trainer.state.fn.value) if self.trainer and self.trainer.state.fn else "fit"
        for split in STAGES[stage]:
            for spec in self.specs[split]:
                if not spec.is_file:
                    read_table(spec)

    def tables(self, split: Split) -> list[tuple[DatasetSpec, Table]]:
        """The datasets of a split."""
        tables = [(spec, read_table(spec)) for spec in self.specs[split]]
        return [(with_columns_of(spec, table) if spec.path in self._copies else spec, table) for spec, table in tables]


def _check_splits(specs: list[DatasetSpec], folder: str | None) -> None:
    """Refuse a file, or a copy in the folder, that is to have several splits: it is one table."""
    files = [(spec.source[0], spec) for spec in specs if spec.is_file]
    if folder is not None:  # The copies are named after the datasets.
        files += [(spec.label, spec) for spec in specs if not is_local(spec)]
    for (file, one), (other_file, other) in combinations(files, 2):
        same = file == other_file and one.where == other.where
        if same and (one.split, one.subset) != (other.split, other.subset):
            raise ValueError(
                f"{one.path} is one table here, but is given with several `split` or `subset`, which would be the same "
                "rows. Give a file for each, with a `path` (of a copy: `name`) of its own, or choose rows with `where`."
            )


def _as_specs(datasets: Datasets) -> list[DatasetSpec]:
    """The datasets as a list of options; a path or rows alone have the default ones."""
    several = isinstance(datasets, list) and not (datasets and isinstance(datasets[0], Mapping))
    specs: Any = datasets if several else [] if datasets is None else [datasets]
    return [with_chart_columns(spec if isinstance(spec, DatasetSpec) else DatasetSpec(spec)) for spec in specs]

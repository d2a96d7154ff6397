"""The problems of a test and its samples on disk: written as batches end, and read if the test is continued."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning._version import __version__
from grail_lightning.app.callbacks.hooks import data_of, policy_of
from grail_lightning.app.results.records import (
    FACTS,
    FORMAT,
    append_samples,
    differences,
    prune,
    read_evaluation,
    read_samples,
    set_digest,
    write_evaluation,
)
from grail_lightning.app.results.table import TableOptions
from grail_lightning.core.data.loaders import EvaluationLoader
from grail_lightning.core.data.rows import RowPrompts
from grail_lightning.core.distributed.sharding import weights_digest
from grail_lightning.core.environments.tools import trial_environment
from grail_lightning.core.records.columns import SAMPLE, Row
from grail_lightning.core.records.task import Task, problem_id
from grail_lightning.core.rollout.batch import GradedBatch
from grail_lightning.core.rollout.rows import rows_of
from grail_lightning.core.runtime.collectives import all_gather_objects, on_first_rank
from grail_lightning.core.runtime.files import held
from grail_lightning.core.runtime.run_folder import RunFolder, unused
from grail_lightning.core.runtime.seeds import run_seed, sample_seed
from grail_lightning.core.tasks.answered import AnswerTask
from grail_lightning.core.tasks.environment import EnvironmentTask
from grail_lightning.worlds.code.task import CodeTask

if TYPE_CHECKING:
    from grail_lightning.core.module import GrailModule

_LONGEST_COLUMN = 100
ProblemKey = tuple[str, int]  # The name of a problem's dataset, and its number there, from 0.
_NO_COLUMNS = ("problem", "answer", "solution", "response", "reference")


@dataclass(frozen=True)
class Batches:
    """The problems of a test, of the batches that are evaluated. A batch has the numbers of loader and batch."""

    loaders: list[EvaluationLoader]  # One for each dataset.
    ids: dict[ProblemKey, str]  # The identity of each problem.
    places: dict[tuple[int, int], list[ProblemKey]]  # The problems of each batch, those of all ranks.

    def of_rank(self, batch: tuple[int, int], trainer: Trainer) -> list[ProblemKey]:
        """The places of the prompts that this rank gets of a batch."""
        return self.places[batch][trainer.global_rank :: trainer.world_size]

    def datasets(self) -> dict[str, list[str]]:
        """The identities of the problems of each dataset."""
        datasets: dict[str, list[str]] = defaultdict(list)
        for (dataset, _), problem in self.ids.items():
            datasets[dataset].append(problem)
        return datasets

    def first_rows(self) -> dict[str, int]:
        """The number of evaluated rows of each dataset of which only the first are evaluated."""
        first = {}
        for number, loader in enumerate(self.loaders):
            evaluated = sum(len(places) for (which, _), places in self.places.items() if which == number)
            whole = evaluated == len(loader.prompts)
            if isinstance(loader.prompts, RowPrompts) and (limit := (spec := loader.prompts.spec).limit) is not None:
                whole = whole and not (spec.where or spec.skip) and len(loader.prompts.table.rows) <= limit
                evaluated = min(evaluated, limit)
            if not whole and (number, 0) in self.places:
                first[self.places[number, 0][0][0]] = evaluated
        return first


def tested_batches(trainer: Trainer) -> Batches | None:
    """The problems of a test; None if a loader is not one of `core.data`, or two have problems of one name.

    Only those loaders are known to give the same problems in the same order when a test is continued.
    """
    loop, batches = trainer.test_loop, Batches([], {}, {})
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    for number, (loader, limit) in enumerate(zip(loaders, loop.max_batches, strict=True)):
        if not isinstance(loader, EvaluationLoader):
            return None
        batches.loaders.append(loader)
        for batch in range(int(min(limit, len(loader)))):
            start = batch * loader.prompts_per_batch
            prompts = loader.prompts[start : start + loader.prompts_per_batch]
            ids = {(prompt.dataset, row): problem_id(prompt) for row, prompt in enumerate(prompts, start)}
            if not batches.ids.keys().isdisjoint(ids):
                return None
            batches.ids.update(ids)
            batches.places[number, batch] = [*ids]
    for name, problems in batches.datasets().items():
        if repeated := len(problems) - len(set(problems)):
            rank_zero_warn(
                f"{repeated} of the {len(problems)} problems of {name or 'the data'} repeat an earlier one. They get "
                "the same responses and are counted again, so the intervals are too narrow."
            )
    return batches if batches.ids else None


def _facts(trainer: Trainer, module: GrailModule, batches: Batches, step: int, table: TableOptions) -> dict[str, Any]:
    """What the samples belong to: ``evaluation.json``. A collective."""
    plan, loaders = module.evaluation, batches.loaders
    every = [loader.prompts for loader in loaders if len(loader.prompts)]
    prompts, data = [rows[0] for rows in every], data_of(trainer)
    settings = {name: value for name, value in vars(module.engine).items() if name[0] != "_"}
    options = {name: value for name, value in settings.items() if isinstance(value, str)}
    # From Python they may hold anything.
    options |= {k: json.dumps(v, sort_keys=True, default=str) for k, v in settings.items() if isinstance(v, dict) and v}
    sources = {
        prompt.dataset: rows.spec.path if isinstance(rows, RowPrompts) else data and type(data).__name__
        for prompt, rows in zip(prompts, every, strict=True)
    }
    return {
        "format": FORMAT,
        "created": _now(),
        "finished": None,
        "grail_lightning": __version__,
        "model": {
            "policy": str(module.policy_name),
            "checkpoint": str(trainer.ckpt_path) if trainer.ckpt_path else None,
            "digest": weights_digest(policy_of(module)),
            "step": step,
            "precision": str(trainer.precision),
            # Differs with the tokenizer, the chat template and its options.
            "encoding": set_digest([str(module.encode(prompt.messages)) for prompt in prompts]),
        },
        "engine": {"class": _class_path(module.engine), **options},
        "sampling": dataclasses.asdict(plan.sampling) | {"stop": list(plan.sampling.stop)},
        "num_samples": plan.num_samples,
        "seed": run_seed(),
        "streams": "problem",  # What random numbers belong to; part of the format.
        "grading": {prompt.dataset: _grading(prompt.task) for prompt in prompts},
        "datasets": {
            name: {
                "problems": len(problems),
                "digest": set_digest(problems),
                "source": sources.get(name),
                "first": table.first.get(name),
            }
            for name, problems in batches.datasets().items()
        },
        "table": {"pass_at": list(table.pass_at), "maj_at": list(table.maj_at), "by": list(table.by)},
    }


def _grading(task: Task) -> dict[str, Any]:
    """How a task grades: its class, and the form and comparison of its answers."""
    grading: dict[str, Any] = {"task": _class_path(task), "compare": task.compare}
    kind = type(task)
    if kind.verdicts is not Task.verdicts or kind.verdict not in (Task.verdict, EnvironmentTask.verdict):
        grading["own_verdicts"] = True
    if kind.make_verifier is not Task.make_verifier:
        grading["verifier"] = f"{kind.make_verifier.__module__}.{kind.make_verifier.__qualname__}"
    if isinstance(task, EnvironmentTask):
        # What two of them have in common: others may be drawn, or a clock.
        with trial_environment(task.environment) as environment, trial_environment(task.environment) as other:
            state, other_state = (dict(getattr(instance, "__dict__", {})) for instance in (environment, other))
        options = {
            k: value
            for k, value in state.items()
            if isinstance(value, str | int | float) and value == other_state.get(k)
        }
        grading["environment"] = {"class": _class_path(environment), "options": options, "calls": task.calls}
        grading["environment"] |= {"instruction": task.tool_instruction, "limits": dataclasses.asdict(task.limits)}
    if isinstance(task, CodeTask):
        grading["limits"] = dataclasses.asdict(task.executor.limits)
    if isinstance(task, AnswerTask) and kind.answer is AnswerTask.answer:
        form: Any = task.form
        grading["answer"] = {"class": _class_path(form)}
        if dataclasses.is_dataclass(form) and not isinstance(form, type):
            grading["answer"] |= dataclasses.asdict(form)
        # Left out where they are off, so that these samples can be compared with those of versions without the options.
        for option in ("evaluated", "in_thinking"):
            grading["answer"].pop(option, None)
            grading["answer"] |= {option: True} if getattr(form, option, False) else {}
    return grading


def _class_path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def check_folder(trainer: Trainer) -> None:
    """Refuse a folder of samples of another version, before a model is loaded. Every rank must call it."""
    folder = _folder(trainer)
    on_first_rank(lambda: read_evaluation(folder) if (folder / FACTS).exists() else None)


def _folder(trainer: Trainer) -> Path:
    """The folder of the samples of a run's tests. A broadcast: every rank must call it."""
    return RunFolder(trainer).path / "test" / "samples"


class KeptSamples:
    """The samples of one test, in its folder.

    If the folder holds an interrupted test of the same model, problems, sampling and seed, its whole batches are
    taken over (`done`, the same on all ranks); the rest is sampled again. Any other one that is there is kept under a
    number. Every rank must call the constructor, `finish` and `close`.
    """

    def __init__(self, trainer: Trainer, module: GrailModule, batches: Batches, step: int, table: TableOptions) -> None:
        self._trainer, self.batches, self._lock = trainer, batches, ExitStack()
        self.folder = _folder(trainer)
        self._facts = _facts(trainer, module, batches, step, table)
        try:
            on_first_rank(self._open)
        except ValueError:
            self._lock.close()
            raise
        self.folder.mkdir(parents=True, exist_ok=True)  # On a machine with a disk of its own.
        self.done = frozenset.intersection(*all_gather_objects(frozenset(self._whole_batches())))

    def known(self) -> Iterator[Row]:
        """This rank's samples of the batches that are `done`."""
        mine = {place for batch in self.done for place in self.batches.of_rank(batch, self._trainer)}
        return (sample for sample in read_samples(self.folder) if (sample["dataset"], sample["index"]) in mine)

    def write(self, samples: Sequence[Row]) -> None:
        """Append the samples of a batch; they are on the disk when this returns."""
        append_samples(self.folder, self._trainer.global_rank, samples)

    def finish(self) -> None:
        """Mark the evaluation as complete, so that the next one begins anew."""
        self._trainer.strategy.barrier("samples")
        if self._trainer.is_global_zero:
            write_evaluation(self.folder, self._facts | {"finished": _now()})
            rank_zero_info(f"The samples are in {self.folder}.")
        self._lock.close()

    def close(self, exception: BaseException | None) -> None:
        """Unlock the folder of an evaluation that was broken off, perhaps by an exception."""
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            rank_zero_info(
                f"The samples of whole batches are kept in {self.folder}; the same command goes on with them."
            )
        self._lock.close()

    def _open(self) -> None:
        """Lock the folder around it. What it holds is moved aside, unless it is this evaluation, interrupted."""
        self._lock.enter_context(held(self.folder.parent, user="evaluation"))
        if (self.folder / FACTS).exists():
            before = read_evaluation(self.folder)
            differ = differences(before, self._facts)
            if not differ and not before["finished"]:
                whole = {place for batch in self._whole_batches() for place in self.batches.places[batch]}
                prune(self.folder, lambda sample: (sample["dataset"], sample["index"]) in whole)
                done = f"{len(whole)} of {len(self.batches.ids)} problems are done"
                rank_zero_info(f"Going on with the evaluation in {self.folder}: {done}.")
                return
            aside = unused(self.folder)
            self.folder.rename(aside)
            what = "an earlier" if before["finished"] else "an interrupted"
            why = f", which differs in {', '.join(differ[:4])}" if differ else ""
            rank_zero_info(f"{self.folder} held {what} evaluation{why}; it is now in {aside}.")
        write_evaluation(self.folder, self._facts)

    def _whole_batches(self) -> set[tuple[int, int]]:
        """The batches of which every sample of every problem is there."""
        numbers: dict[ProblemKey, set[int]] = defaultdict(set)
        for sample in read_samples(self.folder):
            place = sample["dataset"], sample["index"]
            if self.batches.ids.get(place) == sample["problem"]:
                numbers[place].add(sample["sample"])
        whole = {place for place, there in numbers.items() if there == set(range(self._facts["num_samples"]))}
        return {batch for batch, places in self.batches.places.items() if whole.issuperset(places)}


def sample_rows(batch: GradedBatch, indices: Sequence[int]) -> list[Row]:
    """The samples of a batch of ``B`` responses, those of a problem being neighbours.

    `indices` are the places of the problems in their datasets. The seed of a sample is that of a test.
    """
    num_samples, columns = len(batch) // max(1, len(indices)), rows_of(batch, SAMPLE)
    columns["index"] = [index for index in indices for _ in range(num_samples)]
    columns["sample"] = [*range(num_samples)] * len(indices)
    columns["seed"] = list(map(sample_seed, columns["problem"], columns["sample"]))
    columns["columns"] = [_short(cells) for cells in columns["columns"]]
    names = [name for name in SAMPLE if name in columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*(columns[name] for name in names), strict=True)]


def _short(cells: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in cells.items() if name not in _NO_COLUMNS and _is_short(value)}


def _is_short(value: object) -> bool:
    """Whether the value of a further column is a number or a short text, as those of `subject` and `level`."""
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return number or (isinstance(value, str) and len(value) <= _LONGEST_COLUMN)

"""What an evaluation evaluates, and its samples on disk: written as batches end, and read if it is continued."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning._version import __version__
from grail_lightning.callbacks.hooks import data_of, policy_of, subcommand_of
from grail_lightning.callbacks.rollouts import prompt_text
from grail_lightning.data.loaders import EvaluationLoader
from grail_lightning.data.rows import RowPrompts
from grail_lightning.distributed.sharding import weights_digest
from grail_lightning.evaluate.records import (
    FACTS,
    FORMAT,
    Sample,
    SampleWriter,
    differences,
    problem_id,
    prune,
    read_evaluation,
    read_samples,
    set_digest,
    write_evaluation,
)
from grail_lightning.runtime.collectives import all_gather_objects
from grail_lightning.runtime.files import LOCK, held
from grail_lightning.runtime.run_folder import RunFolder, unused
from grail_lightning.runtime.seeds import run_seed
from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Prompt, Task

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule

_LONGEST_COLUMN = 100
_NO_COLUMNS = ("problem", "answer", "solution", "response", "reference")


class Place(NamedTuple):
    """Where a problem stands: the name of its dataset, and its number there, from 0."""

    dataset: str
    number: int


@dataclass(frozen=True)
class Batches:
    """The problems of an evaluation, of the batches that are evaluated."""

    loaders: list[EvaluationLoader]
    """The loaders, one for each dataset."""
    ids: dict[Place, str]
    """The identity of each problem by its place."""
    places: dict[tuple[int, int], list[Place]]
    """The places of each batch, by the numbers of its loader and of the batch; those of all ranks."""

    def of_rank(self, dataloader: int, batch: int, rank: int, ranks: int) -> list[Place]:
        """The places of the prompts that one rank gets of a batch."""
        return self.places[dataloader, batch][rank::ranks]


def evaluated_batches(trainer: Trainer) -> Batches | None:
    """The problems of the present evaluation; None if a loader is not one of `grail_lightning.data`.

    Only those loaders are known to give the same problems in the same order when an evaluation is continued. None, too,
    if two of them have problems of one name, which their places would not tell apart.
    """
    loop = _loop(trainer)
    combined = loop._combined_loader  # Lightning's own properties give another loop's after a fit.
    loaders: list[EvaluationLoader] = []
    ids: dict[Place, str] = {}
    places: dict[tuple[int, int], list[Place]] = {}
    given = [] if combined is None else combined.flattened
    for number, (loader, batches) in enumerate(zip(given, loop.max_batches, strict=True)):
        if not isinstance(loader, EvaluationLoader):
            return None
        loaders.append(loader)
        size = loader.prompts_per_batch
        for batch in range(int(min(batches, len(loader)))):
            here = range(batch * size, min((batch + 1) * size, len(loader.prompts)))
            prompts = [loader.prompts[index] for index in here]
            found = [Place(prompt.dataset, index) for prompt, index in zip(prompts, here, strict=True)]
            if not ids.keys().isdisjoint(found):
                return None
            ids |= {place: problem_id(prompt) for place, prompt in zip(found, prompts, strict=True)}
            places[number, batch] = found
    return Batches(loaders, ids, places) if ids else None


def samples_folder(trainer: Trainer) -> Path:
    """Where the samples of the present evaluation are kept. A broadcast: every rank must call it."""
    stage = subcommand_of(trainer)
    part = f"validation/step_{trainer.global_step:08d}" if stage == "fit" else stage
    return RunFolder(trainer).path / part / "samples"


def evaluation_facts(trainer: Trainer, module: GrailModule, batches: Batches, step: int) -> dict[str, Any]:
    """What the samples belong to: ``evaluation.json`` without `dataset_facts`. A collective."""
    plan = module.evaluation
    tested = trainer.state.fn == "test"
    shares = {"prompts_per_batch": [loader.prompts_per_batch for loader in batches.loaders]}
    prompts = [loader.prompts[0] for loader in batches.loaders if len(loader.prompts)]
    options = {name: value for name, value in vars(module.engine).items() if isinstance(value, str) and name[0] != "_"}
    return {
        "format": FORMAT,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
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
        # A test's random numbers belong to a problem; a validation's to a batch and a rank.
        "streams": "problem" if tested else shares | {"ranks": trainer.world_size},
        "grading": {prompt.dataset: _grading(prompt.task) for prompt in prompts},
    }


def dataset_facts(trainer: Trainer, batches: Batches) -> dict[str, Any]:
    """The number, identity and source of the problems of each dataset. A test warns of those that are there twice.

    `first` is the number of rows of a dataset of which only the first are evaluated (`limit`, or a limit of the
    Trainer's), else None.
    """
    ids: dict[str, list[str]] = {}
    for place, problem in batches.ids.items():
        ids.setdefault(place.dataset, []).append(problem)
    for name, problems in ids.items():
        if trainer.state.fn == "test" and (repeated := len(problems) - len(set(problems))):
            rank_zero_warn(
                f"{repeated} of the {len(problems)} problems of {name or 'the data'} repeat an earlier one. They get "
                "the same responses and are counted again, so the intervals are too narrow. Remove the rows, or keep "
                "this in mind."
            )
    data = data_of(trainer)
    source = None if data is None else type(data).__name__
    facts: dict[str, Any] = {
        name: {"problems": len(problems), "digest": set_digest(problems), "source": source, "first": None}
        for name, problems in ids.items()
    }
    for number, loader in enumerate(batches.loaders):
        name = batches.places[number, 0][0].dataset if (number, 0) in batches.places else ""
        if name in facts:
            evaluated = sum(len(places) for (which, _), places in batches.places.items() if which == number)
            facts[name]["first"] = evaluated if evaluated < len(loader.prompts) else None
            if isinstance(loader.prompts, RowPrompts):
                spec, rows = loader.prompts.spec, len(loader.prompts.table.rows)
                facts[name]["source"] = spec.path
                if spec.limit is not None and (spec.where or rows > spec.limit):
                    facts[name]["first"] = min(evaluated, spec.limit)
    return facts


def _grading(task: Task) -> dict[str, Any]:
    """How a task grades: its class, and the form and comparison of its answers."""
    found: dict[str, Any] = {"task": _class_path(task), "compare": task.compare}
    if isinstance(task, AnswerTask):
        form: object = task.form
        options = dataclasses.asdict(form) if dataclasses.is_dataclass(form) and not isinstance(form, type) else {}
        found["answer"] = {"class": _class_path(form), **options}
    return found


def _class_path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _loop(trainer: Trainer) -> Any:
    if trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return trainer.test_loop if trainer.state.fn == "test" else trainer.validate_loop


class KeptSamples:
    """The samples of one evaluation, in its folder.

    If the folder holds an interrupted evaluation of the same model, problems, sampling and seed, its whole batches are
    taken over (`done`, the same on all ranks); the rest is sampled again. Any other evaluation that is there is kept
    under a number. Every rank must call the constructor, `finish` and `close`.

    Raises:
        ValueError: If another process uses the folder, or a file in it is malformed.
    """

    def __init__(self, trainer: Trainer, folder: Path, facts: dict[str, Any], batches: Batches) -> None:
        self.folder, self.facts, self.batches = folder, facts, batches
        self._trainer, self._lock = trainer, ExitStack()
        refused = ""
        if trainer.is_global_zero:
            try:
                self._open()
            except (ValueError, OSError) as error:
                refused = str(error)
        if refused := trainer.strategy.broadcast(refused):
            self._lock.close()
            raise ValueError(refused)
        folder.mkdir(parents=True, exist_ok=True)  # On a machine with a disk of its own.
        known = self._whole_batches()
        self.done = frozenset.intersection(*all_gather_objects(frozenset(known)))
        rank, ranks = trainer.global_rank, trainer.world_size
        mine = {place for batch in self.done for place in batches.of_rank(*batch, rank, ranks)}
        self._known: dict[Place, list[Sample]] = {place: [] for place in mine}
        for sample in read_samples(folder):
            if (place := Place(sample.dataset, sample.index)) in mine:
                self._known[place].append(replace(sample, prompt="", response=""))
        self._writer = SampleWriter(folder, rank)

    def recalled(self, dataloader: int, batch: int) -> list[Sample]:
        """This rank's samples of a batch that is `done`, in the order in which they would be drawn; without texts."""
        places = self.batches.of_rank(dataloader, batch, self._trainer.global_rank, self._trainer.world_size)
        return [sample for place in places for sample in sorted(self._known[place], key=lambda s: s.sample)]

    def write(self, samples: Sequence[Sample]) -> None:
        """Append the samples of a batch; they are on the disk when this returns."""
        self._writer.write(samples)

    def finish(self) -> None:
        """Mark the evaluation as complete, so that the next one begins anew."""
        self._writer.close()
        self._trainer.strategy.barrier("samples")
        if self._trainer.is_global_zero:
            self.facts["finished"] = datetime.now().astimezone().isoformat(timespec="seconds")
            write_evaluation(self.folder, self.facts)
            rank_zero_info(f"The samples are in {self.folder}.")
        self.close()

    def tell_interrupted(self, exception: BaseException) -> None:
        """Say that a test or a validation which Ctrl-C or SIGTERM has ended is continued by its command."""
        if isinstance(exception, KeyboardInterrupt | SIGTERMException) and self._trainer.state.fn != "fit":
            rank_zero_info(
                f"The samples of whole batches are kept in {self.folder}; the same command goes on with them."
            )

    def close(self) -> None:
        """Close the file and unlock the folder."""
        self._writer.close()
        self._lock.close()

    def _open(self) -> None:
        """Lock the folder, and empty it unless it holds the interrupted evaluation."""
        self._lock.enter_context(held(self.folder, user="evaluation"))
        if (self.folder / FACTS).exists():
            before = read_evaluation(self.folder)
            differ = differences(before, self.facts)
            if not differ and not before["finished"]:
                self._continue()
                return
            self._move_aside(differ, interrupted=not before["finished"])
        write_evaluation(self.folder, self.facts)

    def _continue(self) -> None:
        whole = self._whole_batches()
        kept = {place for batch in whole for place in self.batches.places[batch]}
        prune(self.folder, lambda sample: Place(sample.dataset, sample.index) in kept)
        rank_zero_info(
            f"Going on with the evaluation in {self.folder}: {len(kept)} of {len(self.batches.ids)} problems are done."
        )

    def _move_aside(self, differ: list[str], *, interrupted: bool) -> None:
        aside = unused(self.folder)
        self.folder.rename(aside)
        self._lock.close()
        (aside / LOCK).unlink(missing_ok=True)
        self._lock.enter_context(held(self.folder, user="evaluation"))
        what = "an interrupted evaluation" if interrupted else "an earlier evaluation"
        why = f", which differs in {', '.join(differ[:4])}" if differ else ""
        rank_zero_info(f"{self.folder} held {what}{why}; it is now in {aside}.")

    def _whole_batches(self) -> set[tuple[int, int]]:
        """The batches of which every sample of every problem is there."""
        wanted, found = set(range(self.facts["num_samples"])), dict[Place, set[int]]()
        for sample in read_samples(self.folder):
            place = Place(sample.dataset, sample.index)
            if self.batches.ids.get(place) == sample.problem:
                found.setdefault(place, set()).add(sample.sample)
        whole = {place for place, samples in found.items() if samples == wanted}
        return {batch for batch, places in self.batches.places.items() if whole.issuperset(places)}


def samples_of(output: StepOutput, indices: Sequence[int], seeds: Sequence[int], num_samples: int) -> list[Sample]:
    """The samples of a batch of ``B`` responses, those of a problem being neighbours.

    `indices` are the places of the problems in their datasets; `seeds` are ``B``, of each response's random numbers.
    """
    batch = output.batch
    lengths, finished, correct = (t.tolist() for t in (batch.response_lengths, batch.finished, batch.correct))
    samples = []
    for row, (prompt, verdict) in enumerate(zip(batch.prompts, batch.verdicts, strict=True)):
        if row % num_samples == 0:
            problem, columns = problem_id(prompt), _short_columns(prompt)
        samples.append(
            Sample(
                dataset=prompt.dataset,
                problem=problem,
                index=indices[row // num_samples],
                sample=row % num_samples,
                prompt=prompt_text(prompt),
                reference=prompt.reference,
                response=batch.texts[row],
                prediction=None if verdict.status == "missing" else verdict.prediction,
                correct=correct[row],
                status=verdict.status,
                layer=verdict.layer,
                num_tokens=lengths[row],
                finished=finished[row],
                seed=seeds[row],
                columns=columns,
            )
        )
    return samples


def _short_columns(prompt: Prompt) -> dict[str, Any]:
    """The further columns of a problem that are numbers or short texts, such as `subject` and `level`."""
    return {
        str(name): value
        for name, value in prompt.columns.items()
        if name not in _NO_COLUMNS
        and (
            isinstance(value, bool | int)
            or (isinstance(value, float) and math.isfinite(value))
            or (isinstance(value, str) and len(value) <= _LONGEST_COLUMN)
        )
    }

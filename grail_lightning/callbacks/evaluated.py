"""What an evaluation evaluates: its problems in their batches, and the facts that its samples are kept with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning._version import __version__
from grail_lightning.callbacks.hooks import data_of, policy_of, subcommand_of
from grail_lightning.data.loaders import EvaluationLoader
from grail_lightning.data.rows import RowPrompts
from grail_lightning.distributed.sharding import weights_digest
from grail_lightning.evaluate.records import FORMAT, problem_id, set_digest
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.runtime.seeds import run_seed
from grail_lightning.tasks.answered import AnswerTask
from grail_lightning.tasks.base import Task

if TYPE_CHECKING:
    from pathlib import Path

    from grail_lightning.module import GrailModule


class Place(NamedTuple):
    """Where a problem stands: the name of its dataset, and its number there, from 0."""

    dataset: str
    number: int


@dataclass(frozen=True)
class Batches:
    """The problems of an evaluation.

    Attributes:
        loaders: The loaders, one for each dataset.
        ids: The identity of each problem by its place, of the batches that are evaluated.
        places: The places of each batch, by the numbers of its loader and of the batch; those of all ranks.
    """

    loaders: list[EvaluationLoader]
    ids: dict[Place, str]
    places: dict[tuple[int, int], list[Place]]

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
    """What the samples belong to: ``evaluation.json`` without `dataset_facts`. A collective: every rank must call it.

    Args:
        trainer: The trainer, in an evaluation.
        module: The module.
        batches: The problems.
        step: The number of optimiser steps of the policy.
    """
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
    if trainer.state.fn == "test":
        _tell_repeated(ids)
    data = data_of(trainer)
    found = {
        name: {
            "problems": len(problems),
            "digest": set_digest(problems),
            "source": type(data).__name__ if data is not None else None,
            "first": None,
        }
        for name, problems in ids.items()
    }
    for number, loader in enumerate(batches.loaders):
        name = batches.places[number, 0][0].dataset if (number, 0) in batches.places else ""
        if name in found:
            evaluated = sum(len(places) for (which, _), places in batches.places.items() if which == number)
            found[name]["first"] = evaluated if evaluated < len(loader.prompts) else None
            if isinstance(loader.prompts, RowPrompts):
                spec, rows = loader.prompts.spec, len(loader.prompts.table.rows)
                found[name]["source"] = spec.path
                if spec.limit is not None and (spec.where or rows > spec.limit):
                    found[name]["first"] = min(evaluated, spec.limit)
    return found


def _tell_repeated(ids: dict[str, list[str]]) -> None:
    """Warn of problems that a dataset has several times: a test draws the same responses to them."""
    for name, problems in ids.items():
        if repeated := len(problems) - len(set(problems)):
            rank_zero_warn(
                f"{repeated} of the {len(problems)} problems of {name or 'the data'} repeat an earlier one. They get "
                "the same responses and are counted again, so the intervals are too narrow. Remove the rows, or keep "
                "this in mind."
            )


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


def _loop(trainer: Trainer) -> _EvaluationLoop:
    if trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return trainer.test_loop if trainer.state.fn == "test" else trainer.validate_loop

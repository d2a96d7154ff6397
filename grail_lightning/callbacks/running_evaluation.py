"""One evaluation while it runs: its problems over all ranks, their figures, and the samples that it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from grail_lightning.callbacks.hooks import output_of
from grail_lightning.callbacks.samples import (
    KeptSamples,
    dataset_facts,
    evaluated_batches,
    evaluation_facts,
    samples_folder,
    samples_of,
)
from grail_lightning.data.sources import metric_name, metric_names
from grail_lightning.evaluate.records import Problem, Sample, problems_of
from grail_lightning.evaluate.table import TableOptions, by_column, evaluation_table
from grail_lightning.metrics import (
    AnswerAccuracy,
    LengthsByVerdict,
    MajAtK,
    PassAtK,
    ResponseLengths,
    StatusCounts,
)
from grail_lightning.runtime.collectives import all_gather_objects, world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.outputs import StepOutput, test_seeds, validation_key
from grail_lightning.tasks.base import Prompt

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule

# What the names of the figures of each dataset begin with; the others are logged for all datasets together.
_OF_EACH_DATASET = ("accuracy", "pass_at", "maj_at", "completions/mean_length", "completions/clipped_ratio")


class RunningEvaluation:
    """An evaluation from its first batch to its figures.

    Every rank must call the constructor, `finish` and `close`. The samples are kept if `keep`, and the problems are
    known beforehand. `step` is the number of optimiser steps of the policy.

    Raises:
        ValueError: If the samples cannot be kept; see `KeptSamples`.
    """

    def __init__(self, trainer: Trainer, module: GrailModule, shown: TableOptions, step: int, *, keep: bool) -> None:
        self._trainer, self._plan, self._shown, self._step = trainer, module.evaluation, shown, step
        self._problems: list[Problem] = []  # Those of this rank, and in the end those of all ranks.
        self._digest = 0
        self._kept: KeptSamples | None = None
        self._counted = 0
        batches = evaluated_batches(trainer) if keep or trainer.state.fn == "test" else None
        if batches is None:
            return
        datasets = dataset_facts(trainer, batches)
        first = {name: facts["first"] for name, facts in datasets.items() if facts["first"] is not None}
        self._shown = replace(shown, first=first)
        if keep:
            table = {"pass_at": list(shown.pass_at), "maj_at": list(shown.maj_at), "by": list(shown.by)}
            facts = evaluation_facts(trainer, module, batches, step) | {"datasets": datasets, "table": table}
            self._kept = KeptSamples(trainer, samples_folder(trainer), facts, batches)

    @property
    def done(self) -> frozenset[tuple[int, int]]:
        """The batches that need not be sampled, by the numbers of loader and batch."""
        return frozenset() if self._kept is None else self._kept.done

    def add(self, outputs: object, prompts: Sequence[Prompt], batch: int, dataloader: int) -> None:
        """Count the responses of a batch, and keep them. `outputs` are None for a batch that is `done`."""
        if self._kept is not None and (dataloader, batch) in self._kept.done:
            samples = self._kept.recalled(dataloader, batch)
        else:
            output = output_of(outputs)
            samples, prompts = self._samples(output, batch, dataloader), output.batch.prompts
            if self._kept is not None:
                self._kept.write(samples)
        compare = {prompt.dataset: prompt.task.compare for prompt in prompts}
        for name, rows in groupby(samples, key=lambda sample: sample.dataset):
            self._problems += problems_of(rows, compare[name])
        self._digest += sum(int(sample.problem, 16) for sample in samples if sample.sample == 0)

    def finish(self, pl_module: LightningModule, stage: str) -> dict[str, float]:
        """Log all figures and return them. A collective: every rank computes the same ones of all problems."""
        ranks = all_gather_objects((self._problems, self._digest))
        self._problems = sorted((p for problems, _ in ranks for p in problems), key=lambda p: (p.dataset, p.index))
        self._digest = sum(digest for _, digest in ranks) % 2**64  # In any order, and over any number of ranks.
        figures = evaluation_figures(self._problems, self._shown)
        logged = {f"{stage}/{name}": value for name, value in figures.items() if name != "problems"}
        known = {name: value for name, value in logged.items() if value == value}
        # Without a step Lightning would log at the number of batches, which is 0 outside of a fit.
        pl_module.log_dict(known | {"step": float(self._step)}, batch_size=1, sync_dist=world_size() > 1)
        return figures

    def table(self) -> str:
        """The table of a finished evaluation; empty without problems, and on all ranks but the first."""
        if not self._trainer.is_global_zero or not self._problems:
            return ""
        return evaluation_table(self._problems, self._shown)

    def conditions(self) -> dict[str, Any]:
        """The conditions of the figures: a text, and values that differ if the problems or the sampling differ."""
        temperature, number = self._plan.sampling.temperature, self._plan.num_samples
        drawn = f"temperature {temperature}" if temperature else "greedy"
        samples = f" x {number} samples" if number > 1 else ""
        return {
            "conditions": f"{len(self._problems)} problems{samples}, {drawn}",
            "digest": self._digest,
            "sampling": repr(self._plan),
        }

    def tell_interrupted(self, exception: BaseException) -> None:
        """Say that the evaluation can be continued, if samples are kept and it was stopped on purpose."""
        if self._kept is not None:
            self._kept.tell_interrupted(exception)

    def close(self, *, complete: bool) -> None:
        """Close the folder of the samples; a complete evaluation is marked as one."""
        if self._kept is not None:
            self._kept.finish() if complete else self._kept.close()

    def _samples(self, output: StepOutput, batch: int, dataloader: int) -> list[Sample]:
        """The samples of this rank's share of a batch."""
        number = self._plan.num_samples
        prompts: list[Prompt] = output.batch.prompts[::number]  # Rows of one group are neighbours.
        rank, ranks = self._trainer.global_rank, self._trainer.world_size
        if self._kept is not None:
            indices = [place.number for place in self._kept.batches.of_rank(dataloader, batch, rank, ranks)]
        else:  # Any numbers will do that tell problems apart.
            indices = [(self._counted + k) * ranks + rank for k in range(len(prompts))]
        self._counted += len(prompts)
        if self._trainer.state.fn == "test":
            seeds = test_seeds(prompts, number)
        else:
            seed = derive_seed(run_seed(), *validation_key(dataloader, batch), rank)
            seeds = [seed] * len(output.batch)
        return samples_of(output, indices, seeds, number)


def evaluation_figures(problems: Sequence[Problem], options: TableOptions) -> dict[str, float]:
    """The figures of an evaluation by name: of all problems, of each dataset, and of the parts of `options.by`."""
    figures = _figures(problems, options)
    averaged = ["accuracy", *(f"pass_at_{k}" for k in options.pass_at), *(f"maj_at_{k}" for k in options.maj_at)]
    datasets: dict[str, list[Problem]] = {}
    for problem in problems:
        datasets.setdefault(problem.dataset, []).append(problem)
    parts = metric_names(sorted(name for name in datasets if name))
    of_each = [_figures(datasets[name], options) for name in parts]
    for part, values in zip(parts.values(), of_each, strict=True):
        figures |= {f"{part}/{name}": value for name, value in values.items() if name.startswith(_OF_EACH_DATASET)}
    if len(parts) > 1:
        simple = {name: sum(values[name] for values in of_each) / len(parts) for name in averaged}
        figures |= {f"{name}_simple_average": value for name, value in simple.items()}
    for column in options.by:
        for dataset, value, some in by_column(problems, column):
            values = _figures(some, options)
            part = f"{metric_name(dataset)}/{metric_name(f'{column}_{value}')}"
            figures |= {f"{part}/{name}": values[name] for name in averaged}
    return figures


def _figures(problems: Sequence[Problem], options: TableOptions) -> dict[str, float]:
    """The figures of a set of problems, by the metrics of `grail_lightning.metrics`."""

    def row(values: Iterable[Sequence[int]], dtype: torch.dtype = torch.long) -> torch.Tensor:
        """One entry for each response, ``[B]``."""
        return torch.tensor([value for part in values for value in part], dtype=dtype)

    known = {"sync_on_compute": False}  # Every rank has all problems.
    correct = row((problem.correct for problem in problems), torch.bool)
    finished = row((problem.finished for problem in problems), torch.bool)
    group = row([number] * len(problem.correct) for number, problem in enumerate(problems))
    lengths, votes = row(problem.lengths for problem in problems), row(problem.votes for problem in problems)
    figures = {"problems": float(len(problems)), "accuracy": _value(AnswerAccuracy(**known), correct)}
    figures |= {f"pass_at_{k}": _value(PassAtK(k, **known), correct, group) for k in options.pass_at}
    figures |= {f"maj_at_{k}": _value(MajAtK(k, **known), correct, group, votes) for k in options.maj_at}
    of_lengths = _value(ResponseLengths(**known), lengths, finished) | _value(
        LengthsByVerdict(**known), lengths, correct
    )
    figures |= {f"completions/{name}": value for name, value in of_lengths.items()}
    counts = _value(StatusCounts(**known), [status for problem in problems for status in problem.statuses])
    return figures | {f"verdict/{status}": number / max(1, len(correct)) for status, number in counts.items()}


def _value(metric: Metric, *update: Any) -> Any:
    """The metric after one update: a number, or numbers by name."""
    metric.update(*update)
    value = metric.compute()
    return {name: float(part) for name, part in value.items()} if isinstance(value, dict) else float(value)

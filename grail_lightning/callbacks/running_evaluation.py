"""One evaluation while it runs: the figures of what it has counted, and the samples that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer

from grail_lightning.callbacks.evaluated import dataset_facts, evaluated_batches, evaluation_facts, samples_folder
from grail_lightning.callbacks.hooks import output_of
from grail_lightning.callbacks.kept_samples import KeptSamples, samples_of
from grail_lightning.callbacks.tally import Tally
from grail_lightning.evaluate.records import Sample
from grail_lightning.evaluate.table import TableOptions, evaluation_table
from grail_lightning.runtime.collectives import world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed
from grail_lightning.step.outputs import StepOutput, test_seeds, validation_key
from grail_lightning.tasks.base import Prompt

if TYPE_CHECKING:
    from grail_lightning.module import GrailModule


class RunningEvaluation:
    """An evaluation from its first batch to its figures.

    Every rank must call the constructor, `log`, `table`, `conditions` and `close`.

    Args:
        trainer: The trainer, in an evaluation.
        module: The module, which has the plan of the evaluation.
        shown: The figures and the parts of the data that are told apart.
        step: The number of optimiser steps of the policy.
        keep: Whether the samples are kept, if the problems are known beforehand.

    Raises:
        ValueError: If the samples cannot be kept; see `KeptSamples`.
    """

    def __init__(self, trainer: Trainer, module: GrailModule, shown: TableOptions, step: int, *, keep: bool) -> None:
        self._trainer, self._plan, self._shown, self._step = trainer, module.evaluation, shown, step
        self._tally = Tally(shown.pass_at, shown.maj_at, shown.by, module.device)
        self._kept: KeptSamples | None = None
        self._counted = 0
        batches = evaluated_batches(trainer) if keep or trainer.state.fn == "test" else None
        if batches is None:
            return
        datasets = dataset_facts(trainer, batches)
        first = {name: found["first"] for name, found in datasets.items() if found["first"] is not None}
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
        """Count the responses of a batch, and keep them.

        Args:
            outputs: The output of the step; None for a batch that is `done`.
            prompts: The prompts of the batch.
            batch: Its number.
            dataloader: The number of its loader.
        """
        if self._kept is not None and (dataloader, batch) in self._kept.done:
            self._tally.add(self._kept.recalled(dataloader, batch), prompts)
            return
        output = output_of(outputs)
        samples = self._samples(output, batch, dataloader)
        if self._kept is not None:
            self._kept.write(samples)
        self._tally.add(samples, output.batch.prompts)

    def log(self, pl_module: LightningModule, stage: str) -> dict[str, float]:
        """Log all metrics and return them. Every rank computes the same metrics in the same order."""
        figures = self._tally.compute()
        logged = {f"{stage}/{name}": value for name, value in figures.items() if name != "problems"}
        known = {name: value for name, value in logged.items() if value == value}
        # Without a step Lightning would log at the number of batches, which is 0 outside of a fit.
        pl_module.log_dict(known | {"step": float(self._step)}, batch_size=1, sync_dist=world_size() > 1)
        return figures

    def table(self) -> str:
        """The table of the evaluation; empty without problems, and on all ranks but the first."""
        problems = self._tally.gathered()
        return evaluation_table(problems, self._shown) if self._trainer.is_global_zero and problems else ""

    def conditions(self, problems: float) -> dict[str, Any]:
        """The conditions of the figures: a text, and values that differ if the problems or the sampling differ.

        Args:
            problems: The number of problems.
        """
        temperature, number = self._plan.sampling.temperature, self._plan.num_samples
        drawn = f"temperature {temperature}" if temperature else "greedy"
        samples = f" x {number} samples" if number > 1 else ""
        return {
            "conditions": f"{problems:.0f} problems{samples}, {drawn}",
            "digest": self._tally.digest(),
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

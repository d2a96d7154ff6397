"""The samples of one evaluation on disk: written as batches end, and taken from there if an evaluation is continued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grail_lightning.callbacks.evaluated import Batches, Place
from grail_lightning.callbacks.records import prompt_text
from grail_lightning.evaluate.records import (
    FACTS,
    Sample,
    SampleWriter,
    differences,
    problem_id,
    prune,
    read_evaluation,
    read_samples,
    write_evaluation,
)
from grail_lightning.runtime.collectives import all_gather_objects
from grail_lightning.runtime.files import LOCK, held
from grail_lightning.runtime.run_folder import unused
from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks.base import Prompt

_LONGEST_COLUMN = 100
_NO_COLUMNS = ("problem", "answer", "solution", "response", "reference")


class KeptSamples:
    """The samples of one evaluation, in its folder.

    If the folder holds an interrupted evaluation of the same model, problems, sampling and seed, its whole batches are
    taken over; the rest is sampled again. Any other evaluation that is there is kept under a number. Every rank must
    call the constructor, `finish` and `close`.

    Args:
        trainer: The trainer.
        folder: The folder.
        facts: What is evaluated (`evaluation_facts`).
        batches: The problems.

    Attributes:
        done: The batches that need not be sampled again, by the numbers of loader and batch; the same on all ranks.

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
    """The samples of a batch.

    Args:
        output: The graded responses, ``B`` rows; those of a problem are neighbours.
        indices: The place in its dataset of each problem.
        seeds: ``B`` seeds, of each response's random numbers.
        num_samples: The number of responses to each problem.
    """
    batch = output.batch
    lengths, finished, correct = (t.tolist() for t in (batch.response_lengths, batch.finished, batch.correct))
    samples = []
    for row, (prompt, verdict) in enumerate(zip(batch.prompts, batch.verdicts, strict=True)):
        if row % num_samples == 0:
            problem, columns = problem_id(prompt), short_columns(prompt)
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


def short_columns(prompt: Prompt) -> dict[str, Any]:
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

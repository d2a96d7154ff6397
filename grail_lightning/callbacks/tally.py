"""What an evaluation has counted so far: figures of all problems, of each dataset and of parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from grail_lightning.callbacks.figures import Figures, accuracy_names
from grail_lightning.data.sources import metric_name, metric_names
from grail_lightning.evaluate.records import Problem, Sample, problems_of
from grail_lightning.evaluate.table import by_column
from grail_lightning.runtime.collectives import all_gather_objects, sum_by_name
from grail_lightning.tasks.base import Prompt

# What the names of the figures of each dataset begin with; the others are logged for all datasets together.
OF_EACH_DATASET = ("accuracy", "pass_at", "maj_at", "completions/mean_length", "completions/clipped_ratio")


class Tally:
    """The figures of one evaluation, over all ranks.

    Args:
        pass_at: The k of each pass@k.
        maj_at: The k of each maj@k.
        by: The columns by whose values problems are counted separately.
        device: The device on which ranks exchange the figures.
    """

    def __init__(self, pass_at: Sequence[int], maj_at: Sequence[int], by: Sequence[str], device: torch.device) -> None:
        self.pass_at, self.maj_at, self.by, self.device = pass_at, maj_at, by, device
        self.problems: list[Problem] = []
        self._digests = 0
        self._figures = {"": self._new()}
        self._parts: dict[str, Figures] = {}

    def add(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> None:
        """Add the samples of a batch of prompts, complete problems.

        Args:
            samples: The samples; those of a problem are neighbours.
            prompts: The prompts of the batch, for how their answers are compared.
        """
        compare = {prompt.dataset: prompt.task.compare for prompt in prompts}
        problems: list[Problem] = []
        for name, rows in groupby(samples, key=lambda sample: sample.dataset):
            problems += problems_of(rows, compare[name])
        self._digests += sum(int(sample.problem, 16) for sample in samples if sample.sample == 0)
        self.problems += problems
        self._figures[""].update(problems)
        for name in {problem.dataset for problem in problems if problem.dataset}:
            mine = [problem for problem in problems if problem.dataset == name]
            self._figures.setdefault(name, self._new()).update(mine)
        for column in self.by:
            for dataset, value, part in by_column(problems, column):
                name = f"{metric_name(dataset)}/{metric_name(f'{column}_{value}')}"
                self._parts.setdefault(name, self._new()).update(part)

    def digest(self) -> int:
        """The identity of the set of problems, in any order and over any ranks. A collective."""
        return int(sum_by_name({"digest": self._digests})["digest"]) % 2**64

    def gathered(self) -> list[Problem]:
        """The problems of all ranks, in the order of the data. A collective."""
        found = [problem for rank in all_gather_objects(self.problems) for problem in rank]
        return sorted(found, key=lambda problem: (problem.dataset, problem.index))

    def compute(self) -> dict[str, float]:
        """The figures to log by name, and the number of `problems`. A collective."""
        overall = self._figures[""].compute()
        averaged = accuracy_names(self.pass_at, self.maj_at)
        datasets = self._names(self._figures)
        found: dict[str, float] = {}
        sums = dict.fromkeys(averaged, 0.0)
        for dataset, part in metric_names(datasets).items():
            figures = self._figures.get(dataset) or self._new()
            values = figures.compute()
            found |= {f"{part}/{name}": value for name, value in values.items() if name.startswith(OF_EACH_DATASET)}
            sums = {name: sums[name] + values[name] for name in averaged}
        for part in self._names(self._parts):
            values = (self._parts.get(part) or self._new()).compute()
            found |= {f"{part}/{name}": values[name] for name in averaged}
        if len(datasets) > 1:
            overall |= {f"{name}_simple_average": total / len(datasets) for name, total in sums.items()}
        return overall | found

    def _names(self, figures: dict[str, Figures]) -> list[str]:
        """The sorted names that any rank has seen; the same list on every rank."""
        return sorted(set().union(*all_gather_objects({name for name in figures if name})))

    def _new(self) -> Figures:
        return Figures(self.pass_at, self.maj_at, self.device)
